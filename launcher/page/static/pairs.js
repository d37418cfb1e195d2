// Shows the same held-out prompts before and after training, side by side.

import { h, replace, number } from "./dom.js";
import { getJson } from "./data.js";
import { message, turns, written } from "./episode.js";

export class Pairs {
  constructor(element) {
    this.body = h("div", { class: "pairs" });
    element.append(this.body);
  }

  draw(parts) {
    // Unchanged pairs are not redrawn, so that an open one stays open.
    const key = JSON.stringify(parts.map((part) => [part.run, part.pairs]));
    if (key === this.key) return;
    this.key = key;
    replace(this.body, parts.flatMap((part) => part.pairs.map((pair, i) => this.pair(part.run, pair, i === 0))));
  }

  pair(run, pair, isOpen) {
    const place = h("div", {});
    const [before, after] = pair.sides.map((side) => number(side.reward));
    const summary = h("summary", {}, h("span", { class: `reward ${pair.kind === "improved" ? "good" : "bad"}` }, `${before} → ${after}`), " ", h("span", { class: "id", title: pair.prompt_id }, pair.prompt));
    return h("details", { class: "pair", open: isOpen, ontoggle: (event) => { if (event.target.open && !place.hasChildNodes()) this.fill(place, run, pair); } }, summary, place);
  }

  async fill(place, run, pair) {
    try {
      const episodes = await Promise.all(pair.sides.map(({ file, offset }) => getJson("api/episode", { run, file, offset })));
      const [first] = episodes;
      replace(place,
        first.prompt.map((one) => message(one.role ?? "user", "prompt", one.content)),
        h("p", { class: "note" }, `expected ${written(first.facts.gts)}`),
        h("div", { class: "sides" }, episodes.map((episode, i) => this.side(episode, pair.sides[i]))));
    } catch (error) {
      replace(place, h("p", { class: "missing" }, String(error.message || error).slice(0, 200)));
    }
  }

  side(episode, { version, reward, responses }) {
    const { facts } = episode;
    const mean = responses > 1 ? `, mean of ${number(responses)} responses ${number(reward)}` : "";
    return h("div", {},
      h("h4", {}, `Version ${number(version)}`),
      h("p", { class: "note" }, `reward ${number(facts.reward)}${mean}; ended by ${facts.reason}, ${number(facts.model_tokens ?? 0)} tokens sampled`),
      turns(episode));
  }
}
