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
        could_continue: by request, those that it may be found to continue.
    """

    tree: Tree = field(default_factory=Tree)
    saw: dict[Node, list[int]] = field(default_factory=dict)
    could_continue: dict[Node, list[Node]] = field(default_factory=dict)
    asked: dict[Node, list[dict[str, Any]]] = field(default_factory=dict)
    ids: Any = field(default_factory=itertools.count)
    as_sampled: bool = True

    def fresh(self, n: int) -> np.ndarray:
        return np.asarray(list(itertools.islice(self.ids, n)), np.int32)

    def ask(self, messages: list[dict[str, Any]], setting: Any = None, tail: int = 2) -> Node:
        place = self.tree.find(setting, messages)
        candidates = self.expected(messages)
        node = self.tree.add(place, messages, self.fresh(tail))
        parent = place.parent
        before = [] if parent is None else [*self.saw[parent], *parent.turn.token_ids.tolist()]
        self.saw[node] = [*before, *node.tail.tolist()]
        self.could_continue[node], self.asked[node] = candidates, messages
        return node

    def expected(self, messages: list[dict[str, Any]]) -> list[Node]:
        """By comparing with every earlier conversation: the requests with the longest beginning of this one."""

        def plain(message: dict[str, Any]) -> tuple[str, str]:
            return message["role"], message["content"].replace(THINKING, "" if self.as_sampled else THINKING)

        found: dict[int, list[Node]] = {0: []}
        for node, asked in self.asked.items():
            if node.turn is not None and node.reply is not None:
                conversation = [*map(plain, asked), plain(node.reply)]
                if [*map(plain, messages)][: len(conversation)] == conversation:
                    found.setdefault(len(conversation), []).append(node)
        return found[max(found)]

    def answer(self, node: Node, reply: dict[str, Any], tokens: int = 3, version: int = 0) -> Node:
        ids = self.fresh(tokens)
        seen = np.concatenate([node.prompt_ids(), ids])[node.routed : -1]
        node.turn = Completion(ids, np.zeros(tokens, np.float32) - ids, [(version, 0, tokens)], "stop", experts=seen)
        self.tree.answer(node, reply)
        return node

    def turn(self, messages: list[dict[str, Any]], reply: str | dict[str, Any] = "yes", setting: Any = None) -> Node:
        return self.answer(self.ask(messages, setting), said(reply) if isinstance(reply, str) else reply)


@pytest.mark.parametrize(
    ("reply", "back", "continued"),
    [
        (said("4"), said("4"), {"as_sampled": True, "as_sent": True}),
        (said("4", reasoning="two and two"), said("4"), {"as_sampled": True, "as_sent": False}),
        (said("<think>two and two</think>\n\n4"), said("4"), {"as_sampled": True, "as_sent": False}),
        (said("two and two</think>4"), said("4"), {"as_sampled": True, "as_sent": False}),
        (said(" 4\n"), said("4"), {"as_sampled": True, "as_sent": False}),
        (said("4"), said("5"), {"as_sampled": False, "as_sent": False}),
        (said("4"), said("4", name="sub-agent"), {"as_sampled": False, "as_sent": False}),
        (called("a", x=1), called("b", x=1), {"as_sampled": True, "as_sent": True}),
        (called("a", id=1), called("a", id=2), {"as_sampled": False, "as_sent": False}),
        (called("a", x=1), said(""), {"as_sampled": False, "as_sent": False}),
    ],
)
@pytest.mark.parametrize("history", ["as_sampled", "as_sent"])
def test_a_reply_that_comes_back_is_continued(history: Any, reply: Any, back: Any, continued: dict[str, bool]) -> None:
    agent = Agent(Tree(history))
    first = agent.turn([user("2+2?")], reply)
    second = agent.ask([user("2+2?"), back, user("sure?")])
    assert (second.parent is first) == continued[history]
    assert second.kept == (5 if continued[history] else 0)


@pytest.mark.parametrize(
    "messages",
    [
        [user("2+3?"), said("yes"), user("sure?")],
        [{"role": "system", "content": "be short"}, user("2+2?"), said("yes"), user("sure?")],
        [user("2+2?")],
        [user("2+2?"), user("sure?")],
        [said("yes"), user("sure?")],
    ],
    ids=["other message", "other system prompt", "the same again", "without the reply", "without the question"],
)
def test_another_history_begins_a_conversation(messages: list[dict[str, Any]]) -> None:
    agent = Agent()
    agent.turn([user("2+2?")])
    assert agent.ask(messages).parent is None


def test_other_tools_begin_a_conversation() -> None:
    agent = Agent()
    first = agent.turn([user("2+2?")], setting=TOOLS)
    history = [user("2+2?"), said("yes"), user("sure?")]
    assert agent.ask(history).parent is None
    assert agent.ask(history, TOOLS).parent is first


def test_the_longest_known_beginning_is_continued() -> None:
    agent = Agent()
    agent.turn([user("a")], "1")
    second = agent.turn([user("a"), said("1"), user("b")], "2")
    later = agent.ask([user("a"), said("1"), user("b"), said("2"), user("c"), said("foreign"), user("d")])
    assert later.parent is second
    assert [message["content"] for message in later.messages] == ["c", "foreign", "d"]


def test_of_equal_replies_each_is_continued() -> None:
    agent = Agent()
    nodes = [agent.turn([user("a")], "same") for _ in range(3)]
    following = [agent.turn([user("a"), said("same"), user(f"{i}")]) for i in range(4)]
    assert [node.parent for node in following] == [*nodes, nodes[0]]
    assert agent.tree.find(None, [user("a"), said("same")]).parent is nodes[0]


def test_a_fork_trains_on_what_it_shares_once() -> None:
    agent = Agent()
    first = agent.turn([user("a")], "1")
    left = agent.turn([user("a"), said("1"), user("b")], "2")
    right = agent.turn([user("a"), said("1"), user("c")], "3")
    rows = agent.tree.rows()
    assert [row.tokens().tolist() for row in rows] == [
        [*agent.saw[left], *left.turn.token_ids.tolist()],
        [*agent.saw[right], *right.turn.token_ids.tolist()],
    ]
    assert [row.spans for row in rows] == [[(2, 5), (7, 10)], [(7, 10)]]
    assert first in agent.saw


def test_a_dropped_request_leaves_its_row_to_the_next() -> None:
    agent = Agent()
    agent.turn([user("a")], "1")
    twin = agent.turn([user("a"), said("1"), user("b")], "2")
    kept = agent.turn([user("a"), said("1"), user("b")], "2")
    agent.tree.drop(twin)
    (row,) = agent.tree.rows()
    assert row.tokens().tolist() == [*agent.saw[kept], *kept.turn.token_ids.tolist()]
    assert agent.tree.find(None, [user("a"), said("1"), user("b"), said("2")]).parent is kept


CONNECTED = {
    "shares a message": ([user("the task"), user("more")], "x", True),
    "was told what the task's conversation said": ([user("Sum up: it is forty-two, I am quite sure")], "x", True),
    "said what was sent to the task's conversation": ([user("look it up")], "the result", True),
    "was given a call's argument": ([user("go and find the answer to everything")], "x", True),
    "shares nothing": ([user("Write a title")], "Numbers", False),
    "was told the same by the model": ([user("Write a title")], "it is forty-two, I am quite sure", False),
}


@pytest.mark.parametrize(("messages", "reply", "trained"), CONNECTED.values(), ids=CONNECTED)
def test_what_shares_nothing_with_the_task_is_left_out(messages: Any, reply: str, trained: bool) -> None:
    agent = Agent()
    agent.turn(messages, reply)  # before the task, as some agents ask for a title
    call = called("a", task="find the answer to everything")
    agent.turn([user("the task")], call)
    agent.turn([user("the task"), call, user("the result")], "it is forty-two, I am quite sure")
    assert len(agent.tree.rows("connected")) == 1 + trained
    assert len(agent.tree.rows("all")) == 2


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


AIDE, TITLER = system("You solve tasks with tools"), system("You write titles")
TASK = "Find out how many files there are"
# What an agent asks beside [AIDE, TASK] and its calls, what the model says, and which settings train on it.
BESIDE: dict[str, tuple[list[dict[str, Any]], str, Any, set[str]]] = {
    "a title that quotes the task": ([TITLER, user("Write a title:"), user(TASK)], "Files", None, {"quoting", "all"}),
    "the same instructions for another part": (
        [AIDE, user("look elsewhere")], "Files", None, {"connected", "quoting", "all"},
    ),
    "the task without instructions": ([user(TASK)], "Files", None, {"quoting", "all"}),
    "a topic that shares nothing": ([TITLER, user("Is this new?")], "no", None, {"all"}),
    "another try": ([AIDE, user(TASK)], "About seven", TOOLS, {"connected", "quoting", "all"}),
    "a sub-agent that was asked by a call": (
        [system("You search"), user("search the whole disk for files")], "Seven", None, {"connected", "quoting", "all"},
    ),
    "a sub-agent whose answer is sent back": (
        [system("You search"), user("go")], "There are seven files", None, {"connected", "quoting", "all"},
    ),
    "a summary of what was said": (
        [system("You sum up"), user("So far: I count them one by one, which takes long")], "x", None,
        {"connected", "quoting", "all"},
    ),
    "a plan without its thinking": (
        [system("You do what is planned"), user("Do it: first a, then b, and c")], "x", None,
        {"connected", "quoting", "all"},
    ),
    "a memory in the system message": (
        [system("Remember: I count them one by one, which takes long"), user("go on")], "x", TOOLS,
        {"connected", "quoting", "all"},
    ),
}  # fmt: skip


QUOTED = "Count  the files\nin \u201c/tmp\u201d"
# The task, the conversation about it, what an agent asks under other instructions, and whether that quotes the task.
QUOTES: dict[str, tuple[str, list[dict[str, Any]], list[dict[str, Any]], bool]] = {
    "as a message": (TASK, [AIDE, user(TASK)], [TITLER, user("Title:"), user(TASK)], True),
    "within a message": (TASK, [AIDE, user(TASK)], [TITLER, user(f"Title of <task>{TASK}</task>")], True),
    "both within a message": (TASK, [AIDE, user(f"Solve: {TASK}")], [TITLER, user(f"Title: {TASK}")], True),
    "in the system message": (TASK, [AIDE, user(TASK)], [system(f"Give {TASK!r} a title"), user("go")], True),
    "a short task": ("17 + 25 = ?", [user("17 + 25 = ?")], [TITLER, user("Title: 17 + 25 = ?")], True),
    "with other space": (QUOTED, [user(QUOTED)], [TITLER, user("Title: " + " ".join(QUOTED.split()))], True),
    "in JSON": (QUOTED, [user(QUOTED)], [TITLER, user(json.dumps({"task": QUOTED}))], True),
    "in JSON with letters as they are": (
        QUOTED, [user(QUOTED)], [TITLER, user(json.dumps([QUOTED], ensure_ascii=False))], True,
    ),
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


def test_conversations_about_the_task_under_the_same_instructions_are_connected() -> None:
    agent = Agent(Tree(task="2+2?"))
    plan = agent.turn([user("Plan how to solve this: 2+2?")], "add")
    tries = [agent.turn([user(f"2+2?\n\n{how}")], "4") for how in ("Follow this plan:\nadd", "Guess.")]
    other = agent.turn([user("Say hello")], "hello")
    assert agent.tree.trained("connected") == [plan, *tries]
    assert agent.tree.trained("all") == [plan, *tries, other]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("train", ["connected", "quoting", "all"])
@pytest.mark.parametrize("beside", BESIDE)
def test_what_an_agent_asks_beside_its_task_is_trained_on_by_a_rule(beside: str, train: Any, first: bool) -> None:
    messages, reply, setting, trained = BESIDE[beside]
    agent = Agent()

    def ask_beside() -> Node:
        return agent.turn(messages, reply, setting)

    side = ask_beside() if first else None
    call = called("a", query="search the whole disk for files")
    agent.turn([AIDE, user(TASK)], call, TOOLS)
    result = {"role": "tool", "content": "There are seven files"}
    thinks = said("I count them one by one, which takes long")
    agent.turn([AIDE, user(TASK), call, result], thinks, TOOLS)
    asked = [AIDE, user(TASK), call, result, thinks, user("well?")]
    plan = said("<think>hm</think>\n\nfirst a, then b, and c")
    agent.turn(asked, plan, TOOLS)
    main = agent.turn([*asked, plan, user("and?")], "Seven", TOOLS)
    side = side or ask_beside()
    roots = agent.tree.trained(train)
    assert (side in roots) == (train in trained)
    assert agent.tree.nodes[agent.tree.nodes.index(main)].parent is not None


def test_of_conversations_of_one_request_each_the_task_is_the_one_with_the_most_tokens() -> None:
    agent = Agent()  # it rewrites what it sends back, so that nothing is continued
    agent.turn([TITLER, user("Write a title:"), user(TASK)], "Files")
    first = agent.answer(agent.ask([AIDE, user(TASK)], TOOLS, tail=9), said("I look"))
    second = agent.answer(agent.ask([AIDE, user(TASK), said("I looked")], TOOLS, tail=12), said("Seven"))
    assert agent.tree.trained("connected") == [first, second]


@pytest.mark.parametrize("first", [True, False])
def test_of_conversations_of_one_request_each_the_task_is_the_one_that_has_it_as_a_message(first: bool) -> None:
    agent = Agent(Tree(task=TASK))
    title = [TITLER, user(f"Write a title of {TASK}")]
    if first:
        agent.answer(agent.ask(title, tail=30), said("Files"))
    main = agent.turn([user(TASK)], "Seven")
    if not first:
        agent.answer(agent.ask(title, tail=30), said("Files"))
    assert agent.tree.trained("connected") == [main]


def test_conversations_are_connected_through_others() -> None:
    agent = Agent()
    for messages in ([user("a"), user("b")], [user("b"), user("c")], [user("c"), user("d")], [user("z")]):
        agent.turn(messages, "x" + messages[0]["content"])
    assert len(agent.tree.rows("connected")) == 3


@pytest.mark.integration  # computes for seconds
def test_thousands_of_conversations_are_connected_at_once() -> None:
    agent = Agent()
    for number in range(3000):
        agent.turn([user("the task"), user(f"{number}")], "x")
    assert len(agent.tree.rows("connected")) == 3000


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
        node = agent.ask(messages, tail=draw(st.integers(1, 3)))
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


@settings(max_examples=150, deadline=None)
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


@settings(max_examples=150, deadline=None)
@given(stories())
def test_a_request_continues_its_longest_known_beginning(agent: Agent) -> None:
    for node, candidates in agent.could_continue.items():
        assert node.parent in (candidates or [None])


@settings(max_examples=100, deadline=None)
@given(stories())
def test_connected_rows_are_some_of_all_rows(agent: Agent) -> None:
    everything = [row.tokens().tolist() for row in agent.tree.rows("all")]
    connected = [row.tokens().tolist() for row in agent.tree.rows("connected")]
    assert [tokens for tokens in everything if tokens in connected] == connected
    assert bool(connected) == bool(everything)


LONG = "I count them one by one, since there is no other way that I know of"
LOST: dict[str, tuple[list[dict[str, Any]], Any, str | None]] = {
    "is continued": ([user("2+2?"), said("4"), user("sure?")], None, None),
    "begins anew": ([user("2+2?")], None, None),
    "has another reply": (
        [user("2+2?"), said("4, I think"), user("sure?")], None,
        "request 1 does not continue 0: message 1 (assistant) is '4, I think', and was '4'",
    ),
    "has another question": (
        [user("2+3?"), said("4"), user("sure?")], None, "message 0 (user) is '2+3?', and was '2+2?'",
    ),
    "has other tools": ([user("2+2?"), said("4"), user("sure?")], TOOLS, "it has other tools, or other variables"),
    "has a call for a text": (
        [user("2+2?"), called("a", x=1), user("sure?")], None, "message 1 (assistant) is \"{'name'",
    ),
    "has other roles": ([said("hello"), user("2+2?"), said("4")], None, None),
}  # fmt: skip


@pytest.mark.parametrize("later", LOST)
def test_the_first_message_by_which_a_prefix_is_lost_is_named(later: str) -> None:
    messages, setting, expected = LOST[later]
    agent = Agent()
    agent.turn([user("2+2?")], "4")
    agent.turn(messages, "yes", setting)
    lost = first_lost(agent.tree)
    assert lost is None if expected is None else expected in str(lost)


def test_a_long_text_is_shown_around_the_first_difference() -> None:
    agent = Agent()
    agent.turn([user("how?")], LONG)
    agent.turn([user("how?"), said(LONG.replace("know of", "can see")), user("sure?")])
    lost = first_lost(agent.tree)
    assert lost is not None
    assert (lost.sent, lost.before) == ("…no other way that I can see", "…no other way that I know of")


def test_a_request_is_compared_with_the_nearest_earlier_one() -> None:
    agent = Agent()
    agent.turn([user("a")], "1")
    second = agent.turn([user("a"), said("1"), user("b")], "2")
    agent.turn([user("a"), said("1"), user("b"), said("two"), user("c")], "3")
    lost = first_lost(agent.tree)
    assert lost is not None
    assert (lost.earlier, lost.message, lost.before) == (second.number, 3, "2")
