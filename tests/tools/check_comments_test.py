#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Unit test of the rules in tools/check_comments.py."""
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import check_comments  # noqa: E402


def lines(name, text):
    """Lines with an error."""
    return [line for line, _ in check_comments.errors_of(name, text)]


class CheckCommentsTest(unittest.TestCase):
    def test_comments_begin_with_subject_or_verb(self):
        self.assertEqual(lines("src/a.h", "// Of the batch.\nint a;  // of b\nint b;\n/* Whether c. */\n"), [1, 2, 4])
        self.assertEqual(lines("src/a.h", "// Offsets of rows.\nint a;  // what, who and whether\n"), [2])
        self.assertEqual(lines("src/a.py", '"""Those."""\nA = "of"  # Who\n\ndef f():\n    """What."""\n'), [1, 2, 5])

    def test_wrapped_comments_are_one(self):
        self.assertEqual(lines("src/a.h", "// Offsets\n// of rows.\n// Of it\n"), [])
        self.assertEqual(lines("src/a.h", "int a;  // offsets\n        // of rows\nint b;  // of c\n"), [3])
        self.assertEqual(lines("src/a.h", "// Offsets\n//\n// Of rows.\n"), [3])
        self.assertEqual(lines("src/a.h", "// SPDX-License-Identifier: Apache-2.0\n// Of rows.\n"), [2])

    def test_strings_have_no_comments(self):
        self.assertEqual(lines("src/a.cc", 'auto a = "// of b";\nauto c = R"(// of d)";\nint e = 1\'000;  // of f\n'), [3])

    def test_retired_words(self):
        self.assertEqual(lines("docs/a.md", "It is settled.\nresettled\nBy turns\nbesides\n"), [1, 3])
        self.assertEqual(lines("src/a.h", "struct PlanCompany;\nint plan_company;\nint companyX;\nint accompany;\n"),
                         [1, 2, 3])

    def test_bounds_are_max_and_min(self):
        self.assertEqual(lines("src/a.h", "int most_rows, least_;\nint rows_most;\nint kMostRows;\nint kRowMost;\n"),
                         [1, 1, 2, 3, 4])
        self.assertEqual(lines("src/a.h", "void check_at_most(); // at most, almost, at_least\nint foremost;\n"), [])

    def test_measurements(self):
        self.assertEqual(lines("src/a.h", "// It takes 3 us.\n"), [1])
        self.assertEqual(lines("src/a.h", "// Chosen on H200, 2026-11-22: 3 % faster.\n"), [])
        self.assertEqual(lines("src/a.h", "// Chosen on H200,\n// 2026-11-22: 3 %, not 4 ms.\n"), [1])
        self.assertEqual(lines("src/a.h", "int a = b % 3;  // 3 users\n"), [])
        self.assertEqual(lines("docs/a.md", "It takes 3 us.\n"), [])

    def test_dates_in_public_headers(self):
        self.assertEqual(lines("include/fovea/a.h", "// As of 2026-11-22.\n"), [1])
        self.assertEqual(lines("src/a.h", "// As of 2026-11-22.\n"), [])


if __name__ == "__main__":
    unittest.main()
