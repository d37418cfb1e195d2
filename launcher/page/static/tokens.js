// Colours the tokens of an episode by a measurement of each, or says why there is none.

import { h, prose, replace, number } from "./dom.js";

const COLOURINGS = { logprob: "log-prob", version: "version", advantage: "advantage", ratio: "probability ratio", entropy: "entropy" };
// Lowest probability of each colour.
const SURE = [[0.9, "q0", "90% and more"], [0.5, "q1", "50–90%"], [0.1, "q2", "10–50%"], [0.01, "q3", "1–10%"], [0, "q4", "below 1%"]];
const VERSION_COLOURS = 6;
const STRONG = 0.5; // from this advantage on, the colour is full
// Lowest probability ratio of each colour.
const RATIOS = [[1.5, "up2", "1.5 and more"], [1.05, "up1", "1.05–1.5"], [1 / 1.05, "a0", "about 1"], [1 / 1.5, "down1", "0.67–0.95"], [0, "down2", "below 0.67"]];
// Entropy in nats.
const ENTROPIES = [[2, "q4", "2 nats and more"], [1, "q3", "1–2"], [0.5, "q2", "0.5–1"], [0.05, "q1", "0.05–0.5"], [-Infinity, "q0", "below 0.05: sure"]];
const UNTRAINED = "No batch's record has this episode: it is held out, was skipped or dropped, or is still waiting for its batch.";

// The class of a value on a scale of [least, class, words]; unknown values have none.
function onScale(scale, value) {
  return value === null || value === undefined ? "" : scale.find(([least]) => value >= least)[1];
}

const legendOf = (scale) => scale.map(([, name, words]) => [name, words]);

function advantageClass(value) {
  if (value === null || value === undefined || Math.abs(value) < 1e-9) return "a0";
  return `${value > 0 ? "up" : "down"}${Math.abs(value) >= STRONG ? "2" : "1"}`;
}

function legend(items) {
  return h("p", { class: "token-legend" }, items.map(([name, words]) => h("span", {}, h("span", { class: `token ${name}` }, "\u2002"), ` ${words}`)));
}

// The class of each sampled token, the meaning of the classes, and a text that explains them or says what is missing.
function coloured(episode, colouring) {
  const { tokens, advantage, trained } = episode;
  if (colouring === "logprob") return { of: (i) => onScale(SURE, Math.exp(tokens.logprobs[i])), legend: legendOf(SURE), words: "Colour: the probability of the token when it was sampled." };
  if (colouring === "version") {
    const versions = [...new Set(tokens.versions.filter((version) => version !== null))].sort((a, b) => a - b);
    const name = (version) => `v${versions.indexOf(version) % VERSION_COLOURS}`;
    return { of: (i) => name(tokens.versions[i]), legend: versions.map((version) => [name(version), `version ${version}`]), words: "Colour: the weight version that sampled the token." };
  }
  if (colouring === "advantage") {
    if (trained?.token_advantages) {
      const of = (i) => advantageClass(trained.token_advantages[i]);
      const classes = [["up2", `${STRONG} and above`], ["up1", "above 0"], ["down1", "below 0"], ["down2", `−${STRONG} and below`]];
      return { of, legend: classes, words: "Colour: the advantage with which the token was trained on, by the critic's values." };
    }
    if (trained) {
      const { advantages } = trained;
      const of = (i) => advantages[Math.min(tokens.turns[i], advantages.length - 1)];
      return { of: (i) => advantageClass(of(i)), legend: [...new Set(advantages)].map((value) => [advantageClass(value), number(value)]), words: `Colour: the advantage with which the token was trained on${advantages.length > 1 ? ", turn by turn" : ""}.` };
    }
    if (!advantage) return { words: "A held-out episode, or one that was skipped, is not trained on: it has no advantage." };
    return { of: () => advantageClass(advantage.difference), legend: [[advantageClass(advantage.difference), number(advantage.difference)]], words: `Colour: reward − value, the same for all tokens, before a batch's normalisation. ${UNTRAINED}` };
  }
  if (!trained) return { words: UNTRAINED };
  const step = `in batch ${trained.version}, mini-batch ${trained.mini_batch + 1}`;
  if (colouring === "ratio") return { of: (i) => onScale(RATIOS, trained.ratios[i]), legend: legendOf(RATIOS), words: `Colour: the token's probability when it was trained on (${step}) divided by its probability when it was sampled.` };
  return { of: (i) => onScale(ENTROPIES, trained.entropies[i]), legend: legendOf(ENTROPIES), words: `Colour: the entropy of the policy at the token when it was trained on (${step}).` };
}

export function drawTokens(place, episode, colouring, onChoose) {
  const { tokens } = episode;
  if (!tokens) {
    replace(place, h("p", { class: "missing" }, prose("The tokens of this episode were not kept: only training episodes of every `episode.rollouts_every`-th version keep them, unless their record was cut.")));
    return;
  }
  const choices = h("fieldset", { class: "choices" }, h("legend", {}, "Colour by"), Object.entries(COLOURINGS).map(([value, words]) => h("label", {}, h("input", { type: "radio", name: "colouring", value, checked: value === colouring, onchange: () => onChoose(value) }), words)));
  const { of, legend: items, words } = coloured(episode, colouring);
  const spans = tokens.texts.flatMap((text, i) => {
    const row = tokens.rows.length > 1 ? tokens.rows.indexOf(i) : -1;
    const isSampled = tokens.logprobs[i] !== null;
    const name = isSampled ? (of ? of(i) : "") : "given";
    const learned = episode.trained ? `, ratio ${number(episode.trained.ratios[i])}, entropy ${number(episode.trained.entropies[i])}` : "";
    const title = isSampled ? `id ${tokens.ids[i]}, log-prob ${number(tokens.logprobs[i])}, p ${number(Math.exp(tokens.logprobs[i]))}, version ${tokens.versions[i]}${learned}` : `id ${tokens.ids[i]}, not sampled`;
    const token = h("span", { class: `token ${name}`, title }, text);
    return row < 0 ? [token] : [h("span", { class: "row" }, `row ${row + 1} of ${tokens.rows.length}`), token];
  });
  replace(place, choices, h("p", { class: of ? "note" : "missing" }, words),
    of ? legend([...items, ["given", "not sampled by the model"]]) : null,
    tokens.decoded ? null : h("p", { class: "note" }, "Token ids: the model's tokenizer is not on this machine."),
    h("pre", { class: "tokens" }, spans),
    tokens.left_out ? h("p", { class: "note" }, `${number(tokens.left_out)} more tokens are not shown.`) : null);
}
