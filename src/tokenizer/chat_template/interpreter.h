// SPDX-License-Identifier: Apache-2.0
// Runs a parsed template: statements in execute.cc, expressions in evaluate.cc and operators.cc.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tokenizer/chat_template/builtins.h"
#include "tokenizer/chat_template/syntax.h"
#include "tokenizer/chat_template/template.h"
#include "tokenizer/chat_template/value.h"

namespace fovea::jinja {

// Variables of a block. Assignments go to the innermost scope.
struct Scope {
  Scope* outer = nullptr;
  std::vector<std::pair<std::string_view, Value>> variables = {};

  const Value* find(std::string_view name) const;  // in this scope and outer ones
  void set(std::string_view name, Value value);
};

// A builtin with its subject, a macro, or the body of a call block.
struct Function {
  std::string name;
  const Builtin* builtin = nullptr;
  Value self = {};
  const Statement* macro = nullptr;
  Scope* scope = nullptr;  // the scope of the macro's definition
};

// The variable `loop`.
struct Loop {
  List items;
  size_t index = 0;
  List changed = {};  // arguments of the last call of changed()
  bool has_changed = false;
};

class Interpreter {
 public:
  static constexpr int kMaxDepth = 1000;  // levels of running statements and expressions

  explicit Interpreter(const TemplateLimits& limits) : limits_(limits) {}
  // Throws Failure; line() is then its line.
  std::string run(const Block& block, const Dict& variables);
  int line() const { return line_; }

  // Throw Failure if a limit is exceeded.
  void charge(size_t steps);
  void charge_bytes(size_t bytes);

  List items_of(const Value& value);  // reads it as a loop does
  Value attribute(const Value& object, const std::string& name);
  Value item(const Value& object, const Value& key);
  Value call(const Value& callee, Arguments arguments);
  bool contains(const Value& container, const Value& item);
  Value binary(std::string_view sign, const Value& left, const Value& right);

 private:
  enum class Flow : uint8_t { next, go_on, leave };
  struct Level {
    explicit Level(Interpreter& run);
    ~Level() { --depth; }
    int& depth;
  };

  Flow execute(const Block& block, Scope& scope);
  Flow execute(const Statement& statement, Scope& scope);
  Flow execute_branches(const Statement& statement, Scope& scope);
  Flow execute_loop(const Statement& statement, Scope& scope);
  Flow execute_scope(const Statement& statement, Scope& outer);
  void execute_call(const Statement& statement, Scope& scope);
  void execute_filtered(const Statement& statement, Scope& scope);
  std::string capture(const Block& block, Scope& scope);
  void assign(const Target& target, const Value& value, Scope& scope);
  void write(std::string_view text);
  std::string call_macro(const Function& function, const Arguments& arguments);

  Value evaluate(const Expr& expr, Scope& scope);
  Value evaluate_builtin(const Expr& expr, Scope& scope, const Value& subject);
  // Applies filters, whose innermost subject is absent, to a text.
  Value apply_filters(const Expr& expr, Scope& scope, Value subject);
  Value evaluate_name(const std::string& name, const Scope& scope) const;
  Value evaluate_unary(const Expr& expr, Scope& scope);
  Value evaluate_comparison(const Expr& expr, Scope& scope);
  Value evaluate_conditional(const Expr& expr, Scope& scope);
  Value evaluate_container(const Expr& expr, Scope& scope);
  Value evaluate_call(const Expr& expr, Scope& scope);
  Value concatenate(const Expr& expr, Scope& scope);
  Arguments evaluate_arguments(const Expr& expr, Scope& scope);
  Value slice(const Value& object, const Value& start, const Value& stop, const Value& step);
  Value created(Value value);  // charges for a text

  TemplateLimits limits_;
  size_t steps_ = 0, bytes_ = 0;
  int depth_ = 0;
  int line_ = 1;
  std::string* out_ = nullptr;
};

}  // namespace fovea::jinja
