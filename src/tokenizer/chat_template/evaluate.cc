// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "tokenizer/chat_template/interpreter.h"

namespace fovea::jinja {

Value Interpreter::created(Value value) {
  if (const std::string* text = value.text()) charge_bytes(text->size());
  return value;
}

Value Interpreter::evaluate(const Expr& expr, Scope& scope) {
  const Level level(*this);
  line_ = expr.line;
  const auto part = [&](size_t i) { return evaluate(expr.parts[i], scope); };
  switch (expr.kind) {
    case ExprKind::constant:
      return expr.value;
    case ExprKind::name:
      return evaluate_name(expr.text, scope);
    case ExprKind::list:
    case ExprKind::tuple:
    case ExprKind::dict:
      return evaluate_container(expr, scope);
    case ExprKind::unary:
      return evaluate_unary(expr, scope);
    case ExprKind::binary: {
      const Value left = part(0);
      return created(binary(expr.text, left, part(1)));
    }
    case ExprKind::logic_and: {
      Value left = part(0);
      return left.truth() ? part(1) : left;
    }
    case ExprKind::logic_or: {
      Value left = part(0);
      return left.truth() ? left : part(1);
    }
    case ExprKind::concat:
      return concatenate(expr, scope);
    case ExprKind::comparison:
      return evaluate_comparison(expr, scope);
    case ExprKind::conditional:
      return evaluate_conditional(expr, scope);
    case ExprKind::attribute:
      return attribute(part(0), expr.text);
    case ExprKind::item: {
      const Value object = part(0);
      return created(item(object, part(1)));
    }
    case ExprKind::slice: {
      const Value object = part(0), start = part(1), stop = part(2);
      return created(slice(object, start, stop, part(3)));
    }
    case ExprKind::call:
      return evaluate_call(expr, scope);
    case ExprKind::filter:
    case ExprKind::test:
      return evaluate_builtin(expr, scope, part(0));
  }
  return {};
}

Value Interpreter::evaluate_name(const std::string& name, const Scope& scope) const {
  if (const Value* found = scope.find(name)) return *found;
  if (const Builtin* global = find_global(name))
    return std::make_shared<const Function>(Function{name, global});
  return Value::undefined(name);
}

Value Interpreter::evaluate_container(const Expr& expr, Scope& scope) {
  List items;
  for (const Expr& part : expr.parts) items.push_back(evaluate(part, scope));
  if (expr.kind == ExprKind::list) return items;
  if (expr.kind == ExprKind::tuple) return Value::tuple(std::move(items));
  Dict dict;
  for (size_t i = 0; i < items.size(); i += 2) dict.set(items[i], items[i + 1]);
  return dict;
}

Value Interpreter::evaluate_unary(const Expr& expr, Scope& scope) {
  const Value value = evaluate(expr.parts[0], scope);
  if (expr.text == "not") return !value.truth();
  if (!value.is_number())
    throw Failure{fmt::format("a {} has no '{}'", value.type_name(), expr.text)};
  if (expr.text == "+") return value;
  if (value.is_float()) return -value.number();
  return binary("-", Value(int64_t{0}), value);
}

Value Interpreter::evaluate_comparison(const Expr& expr, Scope& scope) {
  Value left = evaluate(expr.parts[0], scope);
  for (size_t i = 0; i < expr.signs.size(); ++i) {
    Value right = evaluate(expr.parts[i + 1], scope);
    const std::string& sign = expr.signs[i];
    const bool holds = sign == "=="       ? equal(left, right)
                       : sign == "!="     ? !equal(left, right)
                       : sign == "in"     ? contains(right, left)
                       : sign == "not in" ? !contains(right, left)
                       : sign == "<"      ? compare(left, right, sign) < 0
                       : sign == "<="     ? compare(left, right, sign) <= 0
                       : sign == ">"      ? compare(left, right, sign) > 0
                                          : compare(left, right, sign) >= 0;
    if (!holds) return false;
    left = std::move(right);
  }
  return true;
}

Value Interpreter::evaluate_conditional(const Expr& expr, Scope& scope) {
  if (evaluate(expr.parts[0], scope).truth()) return evaluate(expr.parts[1], scope);
  return expr.parts.size() > 2 ? evaluate(expr.parts[2], scope)
                               : Value::undefined("the value without 'else'");
}

Value Interpreter::concatenate(const Expr& expr, Scope& scope) {
  std::string text;
  for (const Expr& part : expr.parts) text += evaluate(part, scope).str();
  return created(std::move(text));
}

Arguments Interpreter::evaluate_arguments(const Expr& expr, Scope& scope) {
  Arguments arguments;
  for (size_t i = 1; i < expr.parts.size(); ++i)
    arguments.positional.push_back(evaluate(expr.parts[i], scope));
  for (const auto& [name, value] : expr.named)
    arguments.named.emplace_back(name, evaluate(value, scope));
  return arguments;
}

Value Interpreter::evaluate_call(const Expr& expr, Scope& scope) {
  const Value callee = evaluate(expr.parts[0], scope);
  Arguments arguments = evaluate_arguments(expr, scope);
  line_ = expr.line;
  return created(call(callee, std::move(arguments)));
}

Value Interpreter::evaluate_builtin(const Expr& expr, Scope& scope, const Value& subject) {
  const Arguments arguments = evaluate_arguments(expr, scope);
  line_ = expr.line;
  return created(expr.builtin->call({*this, expr.text, subject, arguments}));
}

Value Interpreter::apply_filters(const Expr& expr, Scope& scope, Value subject) {
  if (expr.kind != ExprKind::filter) return subject;  // the place of the text
  subject = apply_filters(expr.parts[0], scope, std::move(subject));
  return evaluate_builtin(expr, scope, subject);
}

Value Interpreter::call(const Value& callee, Arguments arguments) {
  if (const Value::Undefined* unknown = callee.unknown())
    throw Failure{fmt::format("'{}' is undefined", unknown->name)};
  if (callee.function() == nullptr)
    throw Failure{fmt::format("a {} cannot be called", callee.type_name())};
  const Function& function = **callee.function();
  if (function.builtin == nullptr) return call_macro(function, arguments);
  return function.builtin->call({*this, function.name, function.self, arguments});
}

}  // namespace fovea::jinja
