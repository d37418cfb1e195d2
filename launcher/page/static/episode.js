// Shows one episode: facts, turns, and tokens in colours.

import { h, marked, replace, number } from "./dom.js";
import { drawTokens } from "./tokens.js";

export function written(value) {
  if (value === null || value === undefined) return "";
  return typeof value === "string" ? value : JSON.stringify(value, null, 1);
}

export function turns(episode, words = []) {
  const rewards = episode.facts.turn_rewards ?? [];
  let turn = 0;
  const messages = episode.messages.map((one) => {
    if (one.request !== undefined) return message(one.role ?? "user", `request ${one.request}`, said(one), words);
    if (one.role === "assistant") {
      turn += 1;
      const reward = rewards[turn - 1];
      return message("assistant", reward === undefined ? `turn ${turn}` : `turn ${turn} · reward ${number(reward)}`, one.content, words);
    }
    if (one.role === "tool") {
      const call = `${one.name ?? "tool"}(${written(one.arguments)})`;
      return message(one.error ? "tool failed" : "tool", call, one.content, words, one.error);
    }
    const about = one.reward === undefined ? "" : `reward ${number(one.reward)}`;
    return message(one.role ?? "user", one.metadata ? `${about} ${written(one.metadata)}` : about, one.content || "(the conversation ends here)", words);
  });
  if (messages.length === 0 && episode.output) return message("assistant", "raw output", episode.output, words);
  return messages;
}

// What an agent or its model said, with the calls, as messages of a chat have them.
function said(one) {
  return [one.reasoning, one.content, ...(one.tool_calls ?? [])].filter(Boolean).map(written).join("\n");
}

export function message(role, about, content, words = [], failed = false) {
  return h("div", { class: `message ${failed ? "error" : String(role).split(" ")[0]}` }, h("div", { class: "role" }, String(role), about ? h("span", { class: "about" }, marked(about, words)) : null), h("pre", { class: "content" }, marked(written(content), words)));
}

export class EpisodeView {
  constructor(element, { onPrompt, onBack }) {
    this.element = element;
    this.onPrompt = onPrompt;
    this.onBack = onBack;
    this.colouring = "logprob";
  }

  fail(words) {
    replace(this.element, this.back(), h("p", { class: "missing" }, words));
  }

  back() {
    return h("button", { type: "button", class: "quiet back", onclick: this.onBack }, "‹ list");
  }

  // `words`: those that were searched for, which are marked.
  draw(episode, words = []) {
    const { facts } = episode;
    const aside = facts.status === "set_aside";
    this.element.scrollTop = 0;
    replace(this.element, this.back(),
      h("header", {}, h("h2", {}, facts.task_id ? h("span", { class: "id" }, marked(String(facts.task_id), words)) : "episode"), h("span", { class: `reward ${aside ? "aside" : facts.reward > 0 ? "good" : "bad"}` }, aside ? "skipped" : `reward ${number(facts.reward)}`)),
      this.facts(facts, episode, words),
      aside ? h("p", { class: "message error" }, h("span", { class: "role" }, "skipped because"), h("span", { class: "content" }, facts.reason)) : null,
      h("h3", {}, "Conversation"),
      episode.prompt.map((one) => message(one.role ?? "user", "prompt", one.content, words)),
      turns(episode, words),
      episode.requests.length ? [h("h3", {}, "Requests"), h("pre", { class: "requests" }, episode.requests.join("\n"))] : null,
      h("h3", {}, "Tokens"),
      this.tokens(episode));
  }

  facts(facts, { advantage, trained, scored }, words) {
    const parts = Object.entries(facts.parts ?? {}).map(([name, value]) => `${name} ${number(value)}`).join(", ");
    const versions = [...new Set(facts.versions ?? [])].join(" to ");
    const rows = [
      ["prompt", facts.prompt_id ? h("button", { type: "button", class: "link", title: "all episodes of this prompt", onclick: () => this.onPrompt(facts.prompt_id) }, marked(String(facts.prompt_id), words)) : null],
      ["kind", facts.kind === "eval" ? "held-out" : "training"],
      ["ended by", facts.status === "set_aside" ? null : facts.reason],
      ["reward parts", parts],
      ["reward by turn", (facts.turn_rewards ?? []).map(number).join(", ")],
      ["value before", advantage ? number(advantage.value) : null],
      ["reward − value", advantage ? number(advantage.difference) : null],
      [`${trained?.token_advantages ? "the tracker's " : ""}${trained?.advantages.length > 1 ? "advantage by turn" : "advantage"}`, trained ? trained.advantages.map(number).join(", ") : null],
      ["dispatched at", facts.version],
      ["sampled by", versions],
      ["trained on in batch", trained ? trained.version : null],
      ["turns", number(facts.turns ?? 0)],
      ["tool calls", facts.tool_calls ? number(facts.tool_calls) : null],
      ["tokens", `${number(facts.tokens ?? 0)}, ${number(facts.model_tokens ?? 0)} sampled${facts.rows > 1 ? `, in ${facts.rows} rows` : ""}`],
      ["seconds", number(facts.seconds)],
      ["generator", facts.generator],
      ["expected", written(facts.gts)],
      ["answer", written(facts.answer)],
      ...scored.map(([name, text]) => [name.replace(/:$/, ""), text]),
      ["left out", (facts.left_out ?? []).length ? written(facts.left_out) : null],
    ];
    return h("dl", { class: "facts" }, rows.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value instanceof Element ? value : marked(String(value), words)))));
  }

  tokens(episode) {
    const place = h("div", {});
    const draw = () => drawTokens(place, episode, this.colouring, (colouring) => {
      this.colouring = colouring;
      draw();
      place.querySelector(`[value="${colouring}"]`)?.focus();
    });
    draw();
    return place;
  }
}
