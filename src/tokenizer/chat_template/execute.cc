// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "tokenizer/chat_template/interpreter.h"

namespace fovea::jinja {

const Value* Scope::find(std::string_view name) const {
  for (const Scope* scope = this; scope != nullptr; scope = scope->outer) {
    for (const auto& [known, value] : scope->variables)
      if (known == name) return &value;
  }
  return nullptr;
}

void Scope::set(std::string_view name, Value value) {
  const auto found = std::ranges::find(variables, name, &std::pair<std::string_view, Value>::first);
  if (found == variables.end()) {
    variables.emplace_back(name, std::move(value));
  } else {
    found->second = std::move(value);
  }
}

Interpreter::Level::Level(Interpreter& run) : depth(run.depth_) {
  run.charge(1);
  if (depth >= kMaxDepth) throw Failure{fmt::format("calls are nested deeper than {}", kMaxDepth)};
  ++depth;
}

std::string Interpreter::run(const Block& block, const Dict& variables) {
  Scope scope;
  for (const auto& [name, value] : variables.entries()) scope.set(*name.text(), value);
  return capture(block, scope);
}

void Interpreter::charge(size_t steps) {
  steps_ += steps;
  if (steps_ > limits_.steps)
    throw Failure{fmt::format("the template takes more than {} steps", limits_.steps)};
}

void Interpreter::charge_bytes(size_t bytes) {
  bytes_ += bytes;
  if (bytes > limits_.text_bytes || bytes_ > limits_.text_bytes)
    throw Failure{fmt::format("the template makes more than {} bytes of text", limits_.text_bytes)};
}

std::string Interpreter::capture(const Block& block, Scope& scope) {
  std::string text;
  std::string* outer = std::exchange(out_, &text);
  execute(block, scope);
  out_ = outer;  // an exception ends the whole run
  return text;
}

void Interpreter::write(std::string_view text) {
  if (out_->size() + text.size() > limits_.output_bytes)
    throw Failure{fmt::format("the output is longer than {} bytes", limits_.output_bytes)};
  charge_bytes(text.size());
  out_->append(text);
}

Interpreter::Flow Interpreter::execute(const Block& block, Scope& scope) {
  for (const Statement& statement : block) {
    const Flow flow = execute(statement, scope);
    if (flow != Flow::next) return flow;
  }
  return Flow::next;
}

Interpreter::Flow Interpreter::execute(const Statement& statement, Scope& scope) {
  const Level level(*this);
  line_ = statement.line;
  switch (statement.kind) {
    case StatementKind::text:
      write(statement.text);
      return Flow::next;
    case StatementKind::output:
      write(evaluate(statement.value[0], scope).str());
      return Flow::next;
    case StatementKind::if_else:
      return execute_branches(statement, scope);
    case StatementKind::for_loop:
      return execute_loop(statement, scope);
    case StatementKind::assign:
      assign(statement.target, evaluate(statement.value[0], scope), scope);
      return Flow::next;
    case StatementKind::set_block: {
      Scope inside{&scope};
      Value text = capture(statement.body, inside);
      if (!statement.value.empty()) text = apply_filters(statement.value[0], scope, text);
      assign(statement.target, text, scope);
      return Flow::next;
    }
    case StatementKind::macro:
      scope.set(statement.text, std::make_shared<const Function>(
                                    Function{statement.text, nullptr, {}, &statement, &scope}));
      return Flow::next;
    case StatementKind::call:
      execute_call(statement, scope);
      return Flow::next;
    case StatementKind::filtered:
      execute_filtered(statement, scope);
      return Flow::next;
    case StatementKind::scope:
      return execute_scope(statement, scope);
    case StatementKind::go_on:
      return Flow::go_on;
    case StatementKind::leave:
      return Flow::leave;
  }
  return Flow::next;
}

Interpreter::Flow Interpreter::execute_branches(const Statement& statement, Scope& scope) {
  for (const Branch& branch : statement.branches) {
    if (branch.condition.empty() || evaluate(branch.condition[0], scope).truth())
      return execute(branch.body, scope);
  }
  return Flow::next;
}

Interpreter::Flow Interpreter::execute_loop(const Statement& statement, Scope& scope) {
  const auto loop = std::make_shared<Loop>();
  for (Value& item : items_of(evaluate(statement.value[0], scope))) {
    if (!statement.condition.empty()) {
      Scope inside{&scope};
      assign(statement.target, item, inside);
      if (!evaluate(statement.condition[0], inside).truth()) continue;
    }
    loop->items.push_back(std::move(item));
  }
  for (; loop->index < loop->items.size(); ++loop->index) {
    Scope inside{&scope};
    inside.set("loop", loop);
    assign(statement.target, loop->items[loop->index], inside);
    if (execute(statement.body, inside) == Flow::leave) break;
  }
  if (!loop->items.empty() || statement.otherwise.empty()) return Flow::next;
  Scope inside{&scope};
  return execute(statement.otherwise, inside);
}

Interpreter::Flow Interpreter::execute_scope(const Statement& statement, Scope& outer) {
  Scope inside{&outer};
  for (const auto& [target, value] : statement.assignments)
    assign(target, evaluate(value, outer), inside);
  return execute(statement.body, inside);
}

void Interpreter::execute_call(const Statement& statement, Scope& scope) {
  const Expr& expr = statement.value[0];
  const Value callee = evaluate(expr.parts[0], scope);
  Arguments arguments = evaluate_arguments(expr, scope);
  arguments.named.emplace_back("caller", std::make_shared<const Function>(
                                             Function{"caller", nullptr, {}, &statement, &scope}));
  write(call(callee, std::move(arguments)).str());
}

void Interpreter::execute_filtered(const Statement& statement, Scope& scope) {
  Scope inside{&scope};
  write(apply_filters(statement.value[0], scope, capture(statement.body, inside)).str());
}

void Interpreter::assign(const Target& target, const Value& value, Scope& scope) {
  if (target.name.empty()) {
    const List items = items_of(value);
    if (items.size() != target.parts.size())
      throw Failure{fmt::format("{} values cannot be assigned to {} names", items.size(),
                                target.parts.size())};
    for (size_t i = 0; i < items.size(); ++i) assign(target.parts[i], items[i], scope);
  } else if (target.attribute.empty()) {
    scope.set(target.name, value);
  } else {
    const Value* found = scope.find(target.name);
    if (found == nullptr || found->space() == nullptr)
      throw Failure{fmt::format("'{}' is no namespace", target.name)};
    (*found->space())->set(target.attribute, value);
  }
}

std::string Interpreter::call_macro(const Function& function, const Arguments& arguments) {
  const std::vector<Parameter>& parameters = function.macro->parameters;
  Scope scope{function.scope};
  if (arguments.positional.size() > parameters.size()) {
    throw Failure{fmt::format("macro '{}' takes up to {} arguments, not {}", function.name,
                              parameters.size(), arguments.positional.size())};
  }
  for (const auto& [name, value] : arguments.named) {
    const auto found = std::ranges::find(parameters, name, &Parameter::name);
    if (found == parameters.end() && name != "caller")
      throw Failure{fmt::format("macro '{}' has no parameter '{}'", function.name, name)};
    scope.set(name, value);
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& parameter = parameters[i];
    const bool named = std::ranges::any_of(
        scope.variables, [&](const auto& variable) { return variable.first == parameter.name; });
    if (i < arguments.positional.size()) {
      if (named)
        throw Failure{
            fmt::format("'{}' of macro '{}' is given twice", parameter.name, function.name)};
      scope.set(parameter.name, arguments.positional[i]);
    } else if (!named) {
      scope.set(parameter.name, parameter.fallback.empty()
                                    ? Value::undefined(parameter.name)
                                    : evaluate(parameter.fallback[0], scope));
    }
  }
  return capture(function.macro->body, scope);
}

}  // namespace fovea::jinja
