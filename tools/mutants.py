#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plants bugs in a copy of the sources, one at a time, and fails unless a test finds each of them.

Each table of tools/mutants/*.toml is one bug, and its name is the file's name and the table's:

    [causal_edge]
    file = "mainloop.cuh"         # relative to `folder`, if the file of mutants gives one
    old = '''the text that occurs exactly once'''
    new = '''the text with the bug'''
    build = ["ninja targets"]     # the targets to rebuild
    run = "program *gtest_filter*"
    environment = {NAME = "value"}
    hangs = true                  # a test that times out has found the bug

`folder`, `build`, `run` and `environment` above the tables are defaults for all mutants of the file.
The copy and its build folder are in --folder. Sources that a mutant does not change are compiled once."""
import argparse
import fnmatch
import os
import pathlib
import re
import subprocess
import sys
import time
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
LISTS = ROOT / "tools" / "mutants"
FIELDS = {"file", "old", "new", "build", "run", "environment", "hangs"}
SHARED = {"folder", "build", "run", "environment"}
# Seconds after which a mutated program counts as hanging.
LIMIT = 600
OUTCOMES = ["found", "survived", "stale", "does not compile", "hangs", "test fails"]


class ListError(Exception):
    """A mistake in a file of mutants."""


class Mutant:
    def __init__(self, list_name, name, table, shared):
        self.name = f"{list_name}/{name}"
        wrong = (set(table) - FIELDS) | {key for key in ("file", "old", "new") if key not in table}
        fields = {**{key: shared[key] for key in ("build", "run", "environment") if key in shared}, **table}
        if wrong := wrong | {key for key in ("build", "run") if key not in fields}:
            raise ListError(f"{self.name}: {', '.join(sorted(wrong))} must be given, others must not")
        if fields["old"] == fields["new"]:
            raise ListError(f"{self.name}: old and new are the same")
        self.file = str(pathlib.PurePosixPath(shared.get("folder", "")) / fields["file"])
        self.old, self.new, self.build = fields["old"], fields["new"], fields["build"]
        self.program, _, self.filter = fields["run"].partition(" ")
        self.environment = fields.get("environment", {})
        self.hangs = fields.get("hangs", False)

    def why_stale(self, root):
        path = root / self.file
        if not path.is_file():
            return f"there is no {self.file}"
        count = path.read_text(encoding="utf-8").count(self.old)
        return "" if count == 1 else f"{self.file} has the old text {count} times instead of once"

    def run_key(self):
        return self.program, self.filter, tuple(sorted(self.environment.items()))


def read_lists():
    mutants = []
    for path in sorted(LISTS.glob("*.toml")):
        with open(path, "rb") as file:
            tables = tomllib.load(file)
        shared = {key: tables.pop(key) for key in SHARED if key in tables}
        for name, table in tables.items():
            if not isinstance(table, dict):
                raise ListError(f"{path.stem}: {name} is not known")
            mutants.append(Mutant(path.stem, name, table, shared))
    return mutants


class Copy:
    """A copy of the user's tree, with uncommitted changes, and its build folder."""

    def __init__(self, folder, ninja, jobs):
        self.source = folder / "source"
        self.build = self.source / "build"
        self.ninja = [ninja, "-C", str(self.build), "-j", str(jobs)]

    def update(self):
        """Copies the sources. Unchanged files keep their times, so that nothing is rebuilt for them."""
        listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others",
                                 "--exclude-standard"], check=True, capture_output=True, text=True).stdout
        names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
        for name in names:
            there, text = self.source / name, (ROOT / name).read_bytes()
            if there.is_file() and there.read_bytes() == text:
                continue
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_bytes(text)
        for path in list(self.source.rglob("*")):
            inside = path.relative_to(self.source)
            if path.is_file() and inside.parts[0] != "build" and inside.as_posix() not in names:
                path.unlink()

    def configure(self):
        if not (self.build / "build.ninja").is_file():
            subprocess.run(["cmake", "-S", str(self.source), "-B", str(self.build), "-G", "Ninja"],
                           check=True, stdout=subprocess.DEVNULL)

    def compile(self, targets):
        """Builds the targets. Returns the compiler's output if it fails, else None."""
        done = subprocess.run([*self.ninja, *sorted(targets)], capture_output=True, text=True)
        return "" if done.returncode == 0 else done.stdout[-4000:] + done.stderr

    def program(self, name):
        found = [path for path in self.build.rglob(name) if path.is_file() and os.access(path, os.X_OK)]
        if len(found) != 1:
            raise ListError(f"{len(found)} programs of the build are called {name}")
        return found[0]

    def run(self, mutant):
        """Returns the exit status (None after a timeout) and the output."""
        command = [str(self.program(mutant.program))]
        if mutant.filter:
            command.append(f"--gtest_filter={mutant.filter}")
        environment = {**os.environ, **mutant.environment}
        try:
            done = subprocess.run(command, env=environment, cwd=self.build, timeout=LIMIT,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, errors="replace")
        except subprocess.TimeoutExpired:
            return None, ""
        return done.returncode, done.stdout


class Runner:
    def __init__(self, copy):
        self.copy = copy
        self.useless = {}  # by Mutant.run_key()

    def prepare(self, mutants):
        """Builds all targets without a mutant."""
        self.copy.update()
        self.copy.configure()
        targets = {target for mutant in mutants for target in mutant.build}
        targets |= {mutant.program for mutant in mutants}
        if errors := self.copy.compile(targets):
            raise ListError(f"the sources without a mutant do not compile:\n{errors}")

    def why_useless(self, mutant):
        """Returns why the mutant's test proves nothing: it fails without the mutant, or does not exist."""
        key = mutant.run_key()
        if key not in self.useless:
            status, output = self.copy.run(mutant)
            passed = re.search(r"\[  PASSED  \] ([0-9]+) test", output)
            passes = status == 0 and passed and passed.group(1) != "0"
            self.useless[key] = "" if passes else f"{mutant.program} {mutant.filter} without the mutant:\n{output[-2000:]}"
        return self.useless[key]

    def try_one(self, mutant):
        """Returns one of OUTCOMES and a reason."""
        if why := mutant.why_stale(self.copy.source):
            return "stale", why
        if why := self.why_useless(mutant):
            return "test fails", why
        path = self.copy.source / mutant.file
        text = path.read_text(encoding="utf-8")
        try:
            path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
            if errors := self.copy.compile(mutant.build):
                return "does not compile", errors
            status, output = self.copy.run(mutant)
        finally:
            path.write_text(text, encoding="utf-8")
            self.copy.compile(mutant.build)  # other programs load the same kernels
        if status is None:
            return ("found" if mutant.hangs else "hangs"), f"no end within {LIMIT} s"
        if status == 0:
            return "survived", f"{mutant.program} {mutant.filter}"
        failed = re.findall(r"\[  FAILED  \] ([^ ,]+)", output)
        return "found", failed[0] if failed else (output.strip().splitlines() or ["no output"])[-1][:100]


def run_all(mutants, runner):
    counts = dict.fromkeys(OUTCOMES, 0)
    start = time.monotonic()
    runner.prepare(mutants)
    for mutant in mutants:
        began = time.monotonic()
        outcome, reason = runner.try_one(mutant)
        counts[outcome] += 1
        print(f"{outcome:<10} {mutant.name}: {reason} ({time.monotonic() - began:.0f} s)", flush=True)
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    print(f"{len(mutants)} mutants in {(time.monotonic() - start) / 60:.0f} minutes: {told}")
    return counts["found"] == len(mutants)


def check(mutants):
    """Returns True if every old text still occurs exactly once. Needs no build."""
    stale = [f"{mutant.name}: {why}" for mutant in mutants if (why := mutant.why_stale(ROOT))]
    print("\n".join(stale) if stale else f"{len(mutants)} mutants, each old text occurs once")
    return not stale


def arguments():
    parser = argparse.ArgumentParser(description="Runs the mutants of tools/mutants.")
    parser.add_argument("--only", action="append", metavar="PATTERN",
                        help="names to run, * for any text; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the names and exit")
    parser.add_argument("--check", action="store_true", help="check that every old text occurs once, and exit")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "build-mutants", help="folder of the copy")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="parallel build jobs")
    parser.add_argument("--ninja", default="ninja", help="the ninja program")
    return parser.parse_args()


def main():
    given = arguments()
    try:
        mutants = read_lists()
        if given.only:
            for pattern in given.only:
                if not any(fnmatch.fnmatch(mutant.name, pattern) for mutant in mutants):
                    raise ListError(f"--only {pattern}: no mutant has such a name")
            mutants = [mutant for mutant in mutants
                       if any(fnmatch.fnmatch(mutant.name, pattern) for pattern in given.only)]
        if given.list:
            print("\n".join(mutant.name for mutant in mutants))
            return 0
        if given.check:
            return 0 if check(mutants) else 1
        runner = Runner(Copy(given.folder.resolve(), given.ninja, given.jobs))
        return 0 if run_all(mutants, runner) else 1
    except ListError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
