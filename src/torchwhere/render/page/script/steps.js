/* Steps and phases: time by step and rank, time by phase and rank, and the table of phases. */

function showSteps(report) {
  const { steps } = report;
  if (!steps.steps.length || !steps.rows.length)
    return nothing(
      "No complete step was recorded.",
      "A step ends with `optimizer.step()`, or where the program calls `torchwhere.step()`.",
    );
  const place = el("div");
  const show = (by) => place.replaceChildren(stepMap(steps, by));
  show("time");
  const options = [
    ["time", "time"],
    ["over", "time over the median of its step"],
  ];
  const late = steps.stragglers.length
    ? el(
        "p",
        { class: "callout" },
        el("b", {}, `${FLAG} Stragglers: `),
        `${steps.stragglers.length === 1 ? "rank" : "ranks"} ${ranksText(steps.stragglers)}`,
      )
    : null;
  return [
    el("div", { class: "controls" }, choice("Colour by", options, { value: "time", onchange: show })),
    late,
    place,
  ].filter(Boolean);
}

function stepMap(steps, by) {
  const { rows, median_ms: medians } = steps;
  const isBucket = rows.some((row) => row.count > 1);
  const over = (row, column) => {
    const ms = rows[row].ms[column];
    return ms === null || medians[column] === null ? null : Math.max(0, ms - medians[column]);
  };
  const map = new HeatMap({
    label: "Time per step: ranks down, steps across",
    rows: rows.length,
    columns: steps.steps.length,
    fromLeast: by === "time",
    value: by === "time" ? (row, column) => rows[row].ms[column] : over,
    rowLabel: (row) => (rows[row].count > 1 ? rows[row].ranks : `rank ${rows[row].ranks}`),
    columnLabel: (column) => String(steps.steps[column]),
    isFlagged: (row) => steps.stragglers.some((rank) => isWithin(rank, rows[row])),
    hint: `${steps.stragglers.length ? `${FLAG} stragglers` : ""}${isBucket ? " each line shows the slowest of its ranks" : ""}`,
    describe: (row, column) => [
      `${rows[row].count > 1 ? "ranks" : "rank"} ${rows[row].ranks}, step ${steps.steps[column]}`,
      rows[row].ms[column] === null ? "not recorded" : duration(rows[row].ms[column]),
      medians[column] === null ? "" : `median of this step ${duration(medians[column])}`,
    ],
  });
  return map.element;
}

/* `row.ranks` is a text such as "0-39" or "0-3, 8". */
function isWithin(rank, row) {
  return row.ranks.split(", ").some((run) => {
    const [first, last] = run.split("-").map(Number);
    return rank >= first && rank <= (last ?? first);
  });
}

function showPhases(report) {
  const { rows, heat: times, parts } = report.phases;
  const ofSteps = parts && parts.length ? stepParts(parts) : null;
  const noPhases = nothing("No phase was recorded.", 'Put `with torchwhere.phase("data"):` around a part of the step.');
  if (!rows.length) return [ofSteps || noPhases].flat();
  const most = rows.reduce((largest, row) => Math.max(largest, row.total_ms || 0), 0);
  const label = (row) => {
    const shown = name(row.name, { longest: 60 });
    shown.style.paddingLeft = `${row.depth * 14}px`;
    return shown;
  };
  const columns = [
    { label: "phase", value: (row) => row.name, cell: label },
    timeColumn("total", "total_ms", { bar: (row) => row.total_ms / most }),
    {
      label: "share",
      value: (row) => row.share,
      cell: (row) => share(row.share),
      isNumber: true,
      title: "of the time of all steps",
    },
    { label: "count", value: (row) => row.count, isNumber: true },
    timeColumn("mean", "mean_ms"),
    timeColumn("longest", "max_ms"),
    timeColumn("min by rank", "min_rank_ms"),
    timeColumn("max by rank", "max_rank_ms"),
    nameColumn("slowest rank", "slowest_rank"),
  ];
  const table = sortedTable({ caption: "Phases", columns, rows, noun: "phase" });
  return [table, times && times.phases.length && times.ranks.length > 1 ? phaseMap(times) : null, ofSteps].filter(Boolean);
}

/* The parts of a step: their keys, and what they mean. They add up to the step. */
const STEP_PARTS = [
  ["data", "a DataLoader gets the next batch"],
  ["forward", "a module runs"],
  ["backward", "the autograd engine runs"],
  ["optimizer", "an optimizer steps"],
  ["wait", "in a collective, until the last rank has issued it"],
  ["checkpoint", "torch.save or torch.distributed.checkpoint runs"],
  ["evaluation", "a module in evaluation mode runs without gradients"],
  ["other", "everything else"],
];

function stepParts(rows) {
  const columns = [
    nameColumn("rank", "rank"),
    timeColumn("step", "step", { title: "mean of its last steps" }),
    ...STEP_PARTS.map(([key, title]) => timeColumn(key, key, { title })),
  ];
  return sortedTable({ caption: "The parts of a step, mean of the last steps", columns, rows, noun: "rank" });
}

function phaseMap(times) {
  const shown = new HeatMap({
    label: "Time per phase: phases down, ranks across",
    rows: times.phases.length,
    columns: times.ranks.length,
    value: (row, column) => times.ms[row][column],
    rowLabel: (row) => times.phases[row],
    columnLabel: (column) => String(times.ranks[column]),
    describe: (row, column) => [
      `${times.phases[row]}, rank ${times.ranks[column]}`,
      times.ms[row][column] === null ? "not recorded" : duration(times.ms[row][column]),
    ],
  });
  return el("figure", {}, el("figcaption", {}, "Time in each phase, by rank"), shown.element);
}
