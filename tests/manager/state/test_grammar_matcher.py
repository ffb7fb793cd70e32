"""Tests the threads in which grammars run."""

import subprocess
import sys

DEEP = """
from tests.manager.helpers.fake_grammars import TOKEN_BYTES, fake_vocabulary
from tokasaurus.manager.state.grammar_manager import JobThread
from tokasaurus.manager.state.grammar_matcher import MatcherThreads

rules = [f'r{n}: "a" r{n + 1} "b" | "c"' for n in range(3000)]
grammar = "start: r0\\n" + "\\n".join(rules) + '\\nr3000: "d"'

def follow():
    threads = MatcherThreads(fake_vocabulary(), 2)
    compiled_grammar = threads.compile(grammar)
    grammar_matchers = [compiled_grammar.begin(False) for _ in range(3)]
    for _ in range(4):
        for matcher in grammar_matchers:
            matcher.token_ids.append(TOKEN_BYTES.index(b"a"))
        threads.advance(grammar_matchers)
    print([matcher.error for matcher in grammar_matchers])

thread = JobThread("deep")
thread(follow)
thread.close(60)
"""


def test_nesting_deeper_than_the_server_allows_does_not_overflow_a_job_threads_stack():
    """The server validates grammars on a stack of 2 MB; this grammar crashes a process with such a stack."""
    done = subprocess.run([sys.executable, "-c", DEEP], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "['', '', '']\n"), done.stderr
