// Guides before methods: a title of a guide counts most, and the reference, adapters and histories come after it.
const LATER = [
  [/^(api\/|_modules\/)/, 0.1],
  [/^(benchmark|measurements)/, 0.15],
  [/^(changelog|contributing|examples_more|protocol_model|fuzzers)$/, 0.6],
  [/^(learning\/|reliability|design|architecture|coming_from_|.*_in_depth$)/, 0.4],
  [/^(quickstart|arrangements|comparison|trajectories|explorers|lightning|queues|persistence|performance|metrics)$/, 1.5],
];

// The guide that a word is looked for in, where its title does not say so.
const ABOUT = [
  [/sampl|draw|n.?step|stack|burn|recurrent|lstm|hindsight|\bher\b|sequence|frame/, /^trajectories$/],
  [/sampl|draw|writer|append|install|check/, /^quickstart$/],
  [/writer|actor|explorer|worker|weights|policy/, /^explorers$/],
  [/gpu|cuda|pin|prefetch|fast|slow|dataloader/, /^performance$/],
  [/save|load|resume|checkpoint|crash|file|disk/, /^persistence$/],
  [/exact|resum|reproduc|\brng|generator/, /^resuming_a_loop$/],
  [/d4rl|minari|offline|record|timeout|terminal|td3|iql|\bbc\b|npz|hdf5/, /^recorded_data$/],
  [/alpha|beta|capacity|priorit/, /^choosing$/],
  [/ppo|impala|on.?policy|fifo|rollout|queue/, /^queues$/],
  [/stale|age\b|version|admi/, /^rollout_age$/],
  [/grpo|rlhf|llm|language|trl/, /^language_models$/],
  [/vllm|http/, /^rollout_sources$/],
  [/verl|slime|nemo|areal/, /^trainers_today$/],
  [/wandb|tensorboard|prometheus|monitor|\blog/, /^metrics$/],
  [/node|cluster|machine|remote|shard/, /^(scaling|sharding)$/],
  [/ddp|fsdp|rank|multi.?gpu|torchrun|learners/, /^learners$/],
  [/lightning|trainer|callback/, /^lightning$/],
  [/watch|\bname|dashboard/, /^watching$/],
  [/ragged|token|nested|padd|varlen|variable.?length/, /^ragged$/],
  [/evaluat/, /^evaluators$/],
  [/held|claim|commit|release/, /^queues$/],
  [/question|faq/, /^questions$/],
];

const ASKED = (new URLSearchParams(globalThis.location?.search).get("q") ?? "").trim();
const GUIDES = ABOUT.filter(([words]) => words.test(ASKED.toLowerCase())).map(([, pages]) => pages);
const IS_NAME = /_|[a-z][A-Z]|\w\.\w/.test(ASKED); // of a call: that comes first, and before mentions where it is a word
const lastPart = (name) => name.split(".").pop().toLowerCase();

function scoreOf([page, title, anchor, description, score]) {
  if (description && lastPart(title) === lastPart(ASKED)) {
    const own = /^torchreplay\.(\w+$|ReplayBuffer|Writer)/.test(title);
    return (IS_NAME ? 60 : 8) - (own ? 0 : 5);
  }
  const sum = LATER.reduce((sum, [pages, factor]) => (pages.test(page) ? sum * factor : sum), score);
  return sum + (GUIDES.some((pages) => pages.test(page)) ? 25 : 0);
}

var Scorer = {
  score: scoreOf,
  objNameMatch: 6,
  objPartialMatch: 2,
  objPrio: { 0: 5, 1: 2, 2: -5 },
  objPrioDefault: 0,
  title: 20,
  partialTitle: 12,
  term: 5,
  partialTerm: 2,
};
