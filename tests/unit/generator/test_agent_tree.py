"""What an agent's requests continue, and their rows: each sampled token is trained on once, behind its prompt."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generator.agents.lost import first_lost
from generator.agents.tree import Node, Tree
from generator.engine.engine import Completion

THINKING = "<think>hm</think>"
TOOLS = {"tools": [{"type": "function", "function": {"name": "calculator"}}]}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def called(call_id: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": "calculator", "arguments": arguments}
    return said("", tool_calls=[{"id": call_id, "type": "function", "function": function}])


@dataclass
class Agent:
    """Asks and is answered; every id is another one, so that a token that is trained on twice would be seen.

    Attributes:
        saw: by request, the ids of its prompt as they were made.
        asked: by request, the whole conversation.
    """

    tree: Tree = field(default_factory=Tree)
    saw: dict[Node, list[int]] = field(default_factory=dict)
    asked: dict[Node, list[dict[str, Any]]] = field(default_factory=dict)
    ids: Any = field(default_factory=itertools.count)
    as_sampled: bool = True

    def fresh(self, n: int) -> np.ndarray:
        return np.asarray(list(itertools.islice(self.ids, n)), np.int32)

    def ask(self, messages: list[dict[str, Any]], setting: Any = None, tail: int = 2) -> Node:
        node = self.tree.find(setting, messages)
        self.tree.add(node, self.fresh(tail))
        parent = node.parent
        before = [] if parent is None else [*self.saw[parent], *parent.turn.token_ids.tolist()]
        self.saw[node], self.asked[node] = [*before, *node.tail.tolist()], messages
        return node

    def expected(self, messages: list[dict[str, Any]]) -> list[Node | None]:
        """By comparing with every earlier conversation: the requests with the longest beginning of this one."""

        def plain(message: dict[str, Any]) -> tuple[str, str]:
            return message["role"], message["content"].replace(THINKING, "" if self.as_sampled else THINKING)

        beginnings: dict[int, list[Node | None]] = {0: [None]}
        for node, asked in self.asked.items():
            if node.turn is not None and node.reply is not None:
                conversation = [*map(plain, asked), plain(node.reply)]
                if [*map(plain, messages)][: len(conversation)] == conversation:
                    beginnings.setdefault(len(conversation), []).append(node)
        return beginnings[max(beginnings)]

    def answer(self, node: Node, reply: dict[str, Any], tokens: int = 3, version: int = 0) -> Node:
        ids = self.fresh(tokens)
        seen = np.concatenate([node.prompt_ids(), ids])[node.routed : -1]
        node.turn = Completion(ids, np.zeros(tokens, np.float32) - ids, [(version, 0, tokens)], "stop", experts=seen)
        self.tree.answer(node, reply)
        return node

    def turn(self, messages: list[dict[str, Any]], reply: str | dict[str, Any] = "yes", setting: Any = None) -> Node:
        return self.answer(self.ask(messages, setting), said(reply) if isinstance(reply, str) else reply)


@pytest.mark.parametrize(
    ("reply", "back", "as_sampled", "as_sent"),
    [
        (said("4"), said("4"), True, True),
        (said("4", reasoning="two and two"), said("4"), True, False),
        (said("<think>two and two</think>\n\n4"), said("4"), True, False),
        (said("two and two</think>4"), said("4"), True, False),
        (said(" 4\n"), said("4"), True, False),
        (said("4"), said("5"), False, False),
        (said("4"), said("4", name="sub-agent"), False, False),
        (called("a", x=1), called("b", x=1), True, True),
        (called("a", id=1), called("a", id=2), False, False),
        (called("a", x=1), said(""), False, False),
    ],
)
def test_a_reply_that_comes_back_is_continued(reply: Any, back: Any, as_sampled: bool, as_sent: bool) -> None:
    for history, continued in (("as_sampled", as_sampled), ("as_sent", as_sent)):
        agent = Agent(Tree(history))  # type: ignore[arg-type]
        first = agent.turn([user("2+2?")], reply)
        second = agent.ask([user("2+2?"), back, user("sure?")])
        assert (second.parent, second.kept) == ((first, 5) if continued else (None, 0)), history


OTHER_HISTORIES = {
    "other message": [user("2+3?"), said("yes"), user("sure?")],
    "other system prompt": [system("be short"), user("2+2?"), said("yes"), user("sure?")],
    "the same again": [user("2+2?")],
    "without the reply": [user("2+2?"), user("sure?")],
    "without the question": [said("yes"), user("sure?")],
}


@pytest.mark.parametrize("history", OTHER_HISTORIES)
def test_another_history_begins_a_conversation(history: str) -> None:
    agent = Agent()
    agent.turn([user("2+2?")])
    assert agent.ask(OTHER_HISTORIES[history]).parent is None


def test_the_longest_known_beginning_with_the_same_tools_is_continued() -> None:
    agent = Agent()
    agent.turn([user("a")], "1", TOOLS)
    second = agent.turn([user("a"), said("1"), user("b")], "2", TOOLS)
    history = [user("a"), said("1"), user("b"), said("2"), user("c"), said("foreign"), user("d")]
    later = agent.ask(history, TOOLS)
    assert later.parent is second
    assert [message["content"] for message in later.messages] == ["c", "foreign", "d"]
    assert agent.ask(history).parent is None


def test_of_equal_replies_each_is_continued() -> None:
    agent = Agent()
    nodes = [agent.turn([user("a")], "same") for _ in range(3)]
    following = [agent.turn([user("a"), said("same"), user(f"{i}")]) for i in range(4)]
    assert [node.parent for node in following] == [*nodes, nodes[0]]
    assert agent.tree.find(None, [user("a"), said("same")]).parent is nodes[0]


def test_a_fork_trains_on_what_it_shares_once() -> None:
    agent = Agent()
    agent.turn([user("a")], "1")
    forks = [agent.turn([user("a"), said("1"), user(text)]) for text in "bc"]
    rows = agent.tree.rows()
    assert [row.tokens().tolist() for row in rows] == [[*agent.saw[one], *one.turn.token_ids] for one in forks]
    assert [row.spans for row in rows] == [[(2, 5), (7, 10)], [(7, 10)]]


AIDE, TITLER, SEARCHER = map(system, ("You solve tasks with tools", "You write titles", "You search"))
TASK, ALL = "Find out how many files there are", "connected quoting all"
# What an agent asks beside [AIDE, TASK] and its calls, what the model says, and which settings train on it.
BESIDE: dict[str, tuple[list[dict[str, Any]], str, Any, str]] = {
    "a title that quotes the task": ([TITLER, user("Write a title:"), user(TASK)], "Files", None, "quoting all"),
    "the task without instructions": ([user(TASK)], "Files", None, "quoting all"),
    "a topic that shares nothing": ([TITLER, user("Is this new?")], "no", None, "all"),
    "what was said before, said again": ([TITLER, user("Is this new?")], "first a, then b, and c", None, "all"),
    "the same instructions for another part": ([AIDE, user("look elsewhere")], "x", None, ALL),
    "another try": ([AIDE, user(TASK)], "About seven", TOOLS, ALL),
    "a sub-agent that was asked by a call": ([SEARCHER, user("search the whole disk for files")], "x", None, ALL),
    "a sub-agent whose answer is sent back": ([SEARCHER, user("go")], "There are seven files", None, ALL),
    "a plan without its thinking, within a message": (
        [system("You do what is planned"), user("Do it: first a, then b, and c")], "x", None, ALL,
    ),
    "a memory in the system message": (
        [system("Remember: I count them one by one, which takes long"), user("go on")], "x", TOOLS, ALL,
    ),
}  # fmt: skip


QUOTED = "Count  the files\nin \u201c/tmp\u201d"
# The task, the conversation about it, what an agent asks under other instructions, and whether that quotes the task.
QUOTES: dict[str, tuple[str, list[dict[str, Any]], list[dict[str, Any]], bool]] = {
    "as a message": (TASK, [AIDE, user(TASK)], [TITLER, user("Title:"), user(TASK)], True),
    "within a message": (TASK, [AIDE, user(TASK)], [TITLER, user(f"Title of <task>{TASK}</task>")], True),
    "in the system message": (TASK, [AIDE, user(TASK)], [system(f"Give {TASK!r} a title"), user("go")], True),
    "with other space": (QUOTED, [user(QUOTED)], [TITLER, user("Title: " + " ".join(QUOTED.split()))], True),
    "in JSON": (QUOTED, [user(QUOTED)], [TITLER, user(json.dumps({"task": QUOTED}))], True),
    "of an agent that rewrites its task": (TASK, [AIDE, user("how many?")], [TITLER, user(f"Title: {TASK}")], True),
    "another text": (TASK, [AIDE, user(TASK)], [TITLER, user("Title of: " + TASK.replace("files", "users"))], False),
    "no task": ("", [AIDE, user("a")], [TITLER, user("b")], False),
}  # fmt: skip


@pytest.mark.parametrize("quotes", QUOTES)
def test_a_conversation_that_quotes_the_task_is_known_however_it_does(quotes: str) -> None:
    task, about, beside, expected = QUOTES[quotes]
    agent = Agent(Tree(task=task))
    main = agent.turn(about, "I look", TOOLS)
    main = agent.turn([*about, said("I look"), user("well?")], "Seven", TOOLS)
    side = agent.turn(beside, "Files")
    assert (side in agent.tree.trained("quoting")) == expected
    assert side not in agent.tree.trained("connected")
    assert main.parent in agent.tree.trained("connected")


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("beside", BESIDE)
def test_what_an_agent_asks_beside_its_task_is_trained_on_by_a_rule(beside: str, first: bool) -> None:
    messages, reply, setting, trained = BESIDE[beside]
    agent = Agent()
    side = agent.turn(messages, reply, setting) if first else None
    call = called("a", query="search the whole disk for files")
    result = {"role": "tool", "content": "There are seven files"}
    thinks = said("I count them one by one, which takes long")
    plan = said("<think>hm</think>\n\nfirst a, then b, and c")
    asked = [AIDE, user(TASK)]
    for says in ([call, result], [thinks, user("well?")], [plan, user("and?")]):
        agent.turn(asked, says[0], TOOLS)
        asked = [*asked, *says]
    side = side or agent.turn(messages, reply, setting)
    assert [train for train in ALL.split() if side in agent.tree.trained(train)] == trained.split()  # type: ignore[arg-type]


def test_of_conversations_of_one_request_each_the_task_is_the_one_with_the_most_tokens_or_the_message() -> None:
    agent = Agent()  # it rewrites what it sends back, so that nothing is continued
    agent.turn([TITLER, user("Write a title:"), user(TASK)], "Files")
    first = agent.answer(agent.ask([AIDE, user(TASK)], TOOLS, tail=9), said("I look"))
    second = agent.answer(agent.ask([AIDE, user(TASK), said("I looked")], TOOLS, tail=12), said("Seven"))
    assert agent.tree.trained("connected") == [first, second]
    agent = Agent(Tree(task=TASK))
    title = agent.answer(agent.ask([TITLER, user(f"Write a title of {TASK}")], tail=30), said("Files"))
    main = agent.turn([user(TASK)], "Seven")
    assert agent.tree.trained("connected") == [main]
    assert agent.tree.trained("all") == [title, main]


def test_conversations_are_connected_through_others() -> None:
    agent = Agent()
    for messages in ([user("a"), user("b")], [user("b"), user("c")], [user("c"), user("d")], [user("z")]):
        agent.turn(messages, "x" + messages[0]["content"])
    assert len(agent.tree.rows("connected")) == 3


@pytest.mark.integration  # computes for seconds
def test_thousands_of_conversations_are_connected_at_once() -> None:
    agent = Agent()
    for number in range(2000):
        agent.turn([user("the task"), user(f"{number}")], "x")
    assert len(agent.tree.rows("connected")) == 2000


@st.composite
def stories(draw: st.DrawFn) -> Agent:
    """Agents that continue, fork, compact, change history, ask again, and leave requests unanswered."""
    as_sampled = draw(st.booleans())
    agent = Agent(Tree("as_sampled" if as_sampled else "as_sent"), as_sampled=as_sampled)
    conversations: list[list[dict[str, Any]]] = []
    for step in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["continue", "continue", "begin", "again", "edit"]))
        if kind == "begin" or not conversations:
            messages = [user(draw(st.sampled_from("abc")))]
        else:
            messages = list(draw(st.sampled_from(conversations)))
            if kind == "again":
                messages = messages[:-1] or messages
            elif kind == "edit":
                messages[0] = user("edited")
            if messages[-1]["role"] == "assistant":
                messages.append(user(draw(st.sampled_from("de"))))
        candidates = agent.expected(messages)
        node = agent.ask(messages, tail=draw(st.integers(1, 3)))
        assert node.parent in candidates
        end = draw(st.sampled_from(["answered", "answered", "answered", "unanswered", "dropped", "unread"]))
        if end == "unanswered":
            continue
        thinking = draw(st.sampled_from(["", THINKING]))
        text = draw(st.sampled_from(["yes", "no"]))
        agent.answer(node, said(thinking + text), draw(st.integers(1, 4)), version=step)
        if end == "dropped":
            agent.tree.drop(node)
        elif end == "answered":
            conversations.append([*messages, said(draw(st.sampled_from([thinking, ""])) + text)])
    return agent


@settings(max_examples=25, deadline=None)
@given(stories())
def test_each_sampled_token_is_in_one_row_after_its_prompt(agent: Agent) -> None:
    rows = agent.tree.rows("all")
    spans = {row.tokens()[start]: (row, start, end) for row in rows for start, end in row.spans}
    sampled = [node for node in agent.tree.nodes if node.turn is not None]
    assert sum(len(row.spans) for row in rows) == len(sampled) == len(spans)
    for node in sampled:
        assert node.turn is not None
        ids = node.turn.token_ids.tolist()
        row, start, end = spans[ids[0]]
        assert row.tokens()[:end].tolist() == [*agent.saw[node], *ids]
        assert node.prompt_ids().tolist() == agent.saw[node]
        index = row.spans.index((start, end))
        assert row.logprobs[index].tolist() == [-float(token) for token in ids]
        versions = [version for version, low, high in row.versions for _ in range(low, high)]
        before = sum(high - low for low, high in row.spans[:index])
        assert versions[before : before + len(ids)] == [node.turn.versions[0][0]] * len(ids)
    # Experts travel with their tokens; of a row's last token, which nobody has read, none are known.
    for row in rows:
        assert row.routed == row.length - 1
        assert np.concatenate(row.experts).tolist() == row.tokens()[:-1].tolist()
    everything, connected = ([row.tokens().tolist() for row in agent.tree.rows(t)] for t in ("all", "connected"))
    assert [tokens for tokens in everything if tokens in connected] == connected
    assert bool(connected) == bool(everything)


SURE = user("sure?")
LONG = "I count them one by one, since there is no other way that I know of"
# The reply to "2+2?", a later request, its tools, and words of what is lost.
LOST: dict[str, tuple[str, list[dict[str, Any]], Any, str]] = {
    "is continued": ("4", [user("2+2?"), said("4"), user("sure?")], None, ""),
    "begins anew": ("4", [user("2+2?")], None, ""),
    "adds a reply of its own": ("4", [user("2+2?"), said("4"), user("sure?"), said("yes"), user("well?")], None, ""),
    "has other roles": ("4", [said("hello"), user("2+2?"), said("4")], None, ""),
    "has another reply": (
        "4", [user("2+2?"), said("4, I think"), SURE], None,
        "request 1 does not continue 0: message 1 (assistant) is '4, I think', and was '4'",
    ),
    "has another question": ("4", [user("2+3?"), said("4"), SURE], None, "message 0 (user) is '2+3?', and was '2+2?'"),
    "has other tools": ("4", [user("2+2?"), said("4"), SURE], TOOLS, "it has other tools, or other variables"),
    "has a call for a text": ("4", [user("2+2?"), called("a", x=1), SURE], None, "(assistant) is \"{'name'"),
    "differs late": (
        LONG, [user("2+2?"), said(LONG.replace("know of", "can see")), user("sure?")], None,
        "is '…no other way that I can see', and was '…no other way that I know of'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("later", LOST)
def test_the_first_message_by_which_a_prefix_is_lost_is_named(later: str) -> None:
    reply, messages, setting, expected = LOST[later]
    agent = Agent()
    agent.turn([user("2+2?")], reply)
    agent.turn(messages, "yes", setting)
    lost = first_lost(agent.tree)
    assert expected in lost if expected else lost == ""


def test_a_request_is_compared_with_the_nearest_earlier_one() -> None:
    agent = Agent()
    agent.turn([user("a")], "1")
    second = agent.turn([user("a"), said("1"), user("b")], "2")
    agent.turn([user("a"), said("1"), user("b"), said("two"), user("c")], "3")
    begins = f"request 2 does not continue {second.number}: message 3 (assistant) is"
    assert first_lost(agent.tree) == f"{begins} 'two', and was '2'"


def test_a_dropped_request_leaves_its_row_to_the_next() -> None:
    agent = Agent()
    agent.turn([user("a")], "1")
    twin = agent.turn([user("a"), said("1"), user("b")], "2")
    kept = agent.turn([user("a"), said("1"), user("b")], "2")
    agent.tree.drop(twin)
    (row,) = agent.tree.rows()
    assert row.tokens().tolist() == [*agent.saw[kept], *kept.turn.token_ids.tolist()]
    assert agent.tree.find(None, [user("a"), said("1"), user("b"), said("2")]).parent is kept


def test_conversations_about_the_task_under_the_same_instructions_are_connected() -> None:
    agent = Agent(Tree(task="2+2?"))
    plan = agent.turn([user("Plan how to solve this: 2+2?")], "add")
    tries = [agent.turn([user(f"2+2?\n\n{how}")], "4") for how in ("Follow this plan:\nadd", "Guess.")]
    other = agent.turn([user("Say hello")], "hello")
    assert agent.tree.trained("connected") == [plan, *tries]
    assert agent.tree.trained("all") == [plan, *tries, other]
