// The tokens of an episode, coloured by what is known of each; what is not known is said.

import { h, prose, replace, number } from "./dom.js";

const COLOURINGS = { logprob: "log-prob", version: "version", advantage: "advantage", ratio: "probability ratio", entropy: "entropy" };
// Probability of the sampled token down to which a token has the colour.
const SURE = [[0.9, "q0", "90% and more"], [0.5, "q1", "50–90%"], [0.1, "q2", "10–50%"], [0.01, "q3", "1–10%"], [0, "q4", "below 1%"]];
const VERSION_COLOURS = 6;
const STRONG = 0.5; // of an advantage, from which on the colour is the full one

function byProbability(tokens, i) {
  const probability = Math.exp(tokens.logprobs[i]);
  return SURE.find(([least]) => probability >= least)[1];
}

function advantageClass(value) {
  if (value === null || value === undefined || Math.abs(value) < 1e-9) return "a0";
  return `${value > 0 ? "up" : "down"}${Math.abs(value) >= STRONG ? "2" : "1"}`;
}

function legend(items) {
  return h("p", { class: "token-legend" }, items.map(([name, words]) => h("span", {}, h("span", { class: `token ${name}` }, "\u2002"), ` ${words}`)));
}

// Which class each sampled token has, what the classes mean, and what is missing.
function coloured(episode, colouring) {
  const { tokens, advantage, unknown, advantages } = episode;
  if (colouring === "logprob") return { of: (i) => byProbability(tokens, i), legend: SURE.map(([, name, words]) => [name, words]), words: "Colour: the probability with which the token was sampled." };
  if (colouring === "version") {
    const versions = [...new Set(tokens.versions.filter((version) => version !== null))].sort((a, b) => a - b);
    const name = (version) => `v${versions.indexOf(version) % VERSION_COLOURS}`;
    return { of: (i) => name(tokens.versions[i]), legend: versions.map((version) => [name(version), `version ${version}`]), words: "Colour: the weight version that sampled the token." };
  }
  if (colouring === "advantage") {
    if (Array.isArray(advantages)) {
      const of = (i) => advantages[Math.min(tokens.turns[i], advantages.length - 1)];
      return { of: (i) => advantageClass(of(i)), legend: [...new Set(advantages)].map((value) => [advantageClass(value), number(value)]), words: `Colour: the advantage with which the token was trained on${advantages.length > 1 ? ", turn by turn" : ""}.` };
    }
    if (!advantage) return { words: "A held-out episode, or one that was set aside, is not trained on: it has no advantage." };
    return { of: () => advantageClass(advantage.difference), legend: [[advantageClass(advantage.difference), number(advantage.difference)]], words: "Colour: reward − value, the same for all tokens. The batch's normalisation of it is not kept with the episode." };
  }
  return { words: unknown[colouring] };
}

export function drawTokens(place, episode, colouring, onChoose) {
  const { tokens } = episode;
  if (!tokens) {
    replace(place, h("p", { class: "missing" }, prose("No tokens were kept of this episode: training episodes of every `episode.rollouts_every`-th version have theirs, held-out ones and cut records have none.")));
    return;
  }
  const choices = h("fieldset", { class: "choices" }, h("legend", {}, "Colour by"), Object.entries(COLOURINGS).map(([value, words]) => h("label", {}, h("input", { type: "radio", name: "colouring", value, checked: value === colouring, onchange: () => onChoose(value) }), words)));
  const { of, legend: items, words } = coloured(episode, colouring);
  const spans = tokens.texts.map((text, i) => {
    const isSampled = tokens.logprobs[i] !== null;
    const name = isSampled ? (of ? of(i) : "") : "given";
    const title = isSampled ? `id ${tokens.ids[i]}, log-prob ${number(tokens.logprobs[i])}, p ${number(Math.exp(tokens.logprobs[i]))}, version ${tokens.versions[i]}` : `id ${tokens.ids[i]}, not sampled`;
    return h("span", { class: `token ${name}`, title }, text);
  });
  replace(place, choices, h("p", { class: of ? "note" : "missing" }, words),
    of ? legend([...items, ["given", "not sampled by the model"]]) : null,
    tokens.decoded ? null : h("p", { class: "note" }, "Token ids: the model's tokenizer is not on this machine."),
    h("pre", { class: "tokens" }, spans),
    tokens.left_out ? h("p", { class: "note" }, `${number(tokens.left_out)} more tokens are not shown.`) : null);
}
