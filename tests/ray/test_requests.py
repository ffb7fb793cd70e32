"""What routing reads of a body: beginnings that two prompts share must be prefixes that they share."""

import gzip
from itertools import takewhile

import orjson
import pytest

from tokasaurus.ray.requests import routed_prompt
from tokasaurus.server.engine_client.replicas import PrefixIndex, RoutedPrompt

SYSTEM = {"role": "system", "content": "You know all rivers of the world, and answer in one sentence. " * 10}
TOOLS = [{"type": "function", "function": {"name": f"tool_{number}", "parameters": {}}} for number in range(10)]


def routed(headers: dict[bytes, bytes] | None = None, **fields: object) -> RoutedPrompt:
    prompt = routed_prompt(headers or {}, orjson.dumps({"model": "default", **fields}))
    assert prompt is not None
    return prompt


def num_shared(first: RoutedPrompt, second: RoutedPrompt) -> int:
    pairs = zip(first.prefixes, second.prefixes, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def question(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_chats_share_the_prefixes_of_the_messages_that_they_share() -> None:
    first = routed(messages=[SYSTEM, question("Where is the Rhine?")])
    second = routed(messages=[SYSTEM, question("Where is the Nile?")], max_tokens=3)
    more = routed(messages=[SYSTEM, question("Where is the Rhine?"), question("And its mouth?")])
    other = routed(messages=[question("Hello. " * 100)])
    system_units = len(orjson.dumps([SYSTEM])) // 4
    assert num_shared(first, second) == system_units // 16
    assert num_shared(first, more) == len(first.prefixes)
    assert num_shared(first, other) == 0


def test_tools_come_before_messages() -> None:
    """As chat templates write them: other tools make the whole prompt another one."""
    with_tools = [routed(tools=TOOLS, messages=[SYSTEM, question(str(n))]) for n in (1, 2)]
    others = routed(tools=TOOLS[::-1], messages=[SYSTEM, question("1")])
    assert num_shared(*with_tools) > len(orjson.dumps(TOOLS)) // 64
    assert num_shared(with_tools[0], others) < 2


@pytest.mark.parametrize("in_list", [False, True])
def test_prompts_of_token_ids_are_counted_in_tokens(in_list: bool) -> None:
    ids = list(range(200))
    prompt = routed(prompt=[ids, [1]] if in_list else ids)
    assert prompt.num_tokens == 200
    assert prompt == routed(prompt=ids)
    assert num_shared(prompt, routed(prompt=[*ids[:100], 7, 8])) == 100 // 16


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a river " * 100},
        {"input": "a river " * 100, "instructions": "Be brief."},
        {"system": "Be brief.", "messages": [question("a river " * 100)]},
    ],
)
def test_every_endpoint_has_its_prompt(fields: dict[str, object]) -> None:
    prompt = routed(**fields)
    assert abs(prompt.num_tokens - 200) < 30, "about four bytes for a token"
    index = PrefixIndex(1000)
    prompt.add_to(index)
    assert prompt.cost(index, 0)[0] < prompt.cost(PrefixIndex(1000), 0)[0]


def test_salts_and_sessions() -> None:
    first, second = (routed({b"x-session-id": b"a"}, prompt="a river " * 100, cache_salt=salt) for salt in ("x", "y"))
    assert num_shared(first, second) == 0
    assert first.session == "a"


@pytest.mark.parametrize(
    "body",
    [
        b"no JSON",
        gzip.compress(b'{"prompt": "a"}', mtime=0),
        b"[1]",
        b'{"prompt": 5}',
        b'{"prompt": [1, "a"]}',
        b'{"prompt": [1, 99999999999]}',
        b'{"prompt": [[1, [2]]]}',
        b'{"messages": null}',
    ],
)
def test_bodies_without_a_prompt_may_go_anywhere(body: bytes) -> None:
    """What is wrong with them is the replica's to say."""
    assert routed_prompt({}, body) is None
