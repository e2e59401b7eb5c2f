// Guides before methods: a title of a guide counts most, and the reference, adapters and histories come after it.
const LATER = [
  [/^(api\/|_modules\/)/, 0.1],
  [/^(benchmark|measurements)/, 0.15],
  [/^(learning\/|reliability|design|architecture|coming_from_)/, 0.4],
  [/^(quickstart|arrangements|comparison|trajectories|explorers|lightning|queues|persistence|performance|metrics)/, 1.5],
];

var Scorer = {
  score: ([page, title, anchor, description, score]) =>
    LATER.reduce((sum, [pages, factor]) => (pages.test(page) ? sum * factor : sum), score),
  objNameMatch: 6,
  objPartialMatch: 2,
  objPrio: { 0: 5, 1: 2, 2: -5 },
  objPrioDefault: 0,
  title: 20,
  partialTitle: 12,
  term: 5,
  partialTerm: 2,
};
