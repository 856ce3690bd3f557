/* The sections of text: the layout, the compiled graphs, and the notes and log lines of the ranks side by side. */

function showLayout(report) {
  const { cohorts, difference: differences } = report.layout;
  if (!cohorts.length)
    return nothing(
      "No layout was recorded.",
      "It is recorded at the end of the first step of a model with parameters, or at the end of the watch.",
    );
  const list = differences.length
    ? el(
        "ul",
        { class: "plain" },
        differences.map((line) => el("li", {}, name(line, { mono: false }))),
      )
    : null;
  const parts = cohorts.map((cohort, at) => fold(`ranks ${cohort.ranks}`, () => layoutText(cohort.lines), { open: at === 0 }));
  return [list, ...parts].filter(Boolean);
}

function layoutText(lines) {
  const shown = lines.flatMap((line) => [el("bdi", {}, cut(inert(line), 400)), document.createTextNode("\n")]);
  return el("pre", { tabindex: "0", role: "group", "aria-label": "layout" }, shown);
}

function showGraphs(report) {
  if (!report.graphs.length)
    return nothing("No compiled graph was recorded.", "Graphs appear when the program uses `torch.compile`.");
  const hasTime = report.graphs.some((graph) => graph.ms);
  const reasons = (graph) =>
    graph.reasons.length
      ? el(
          "ul",
          { class: "plain" },
          graph.reasons.map((reason) => el("li", {}, name(reason, { longest: 160 }))),
        )
      : null;
  const columns = [
    { label: "graph", value: (graph) => graph.name, cell: (graph) => name(graph.name, { longest: 60 }) },
    { label: "part", value: (graph) => graph.part, cell: (graph) => name(graph.part, { mono: false }) },
    { label: "ranks", value: (graph) => graph.ranks, isNumber: true },
    { label: "compiled", value: (graph) => graph.count, isNumber: true, title: "times, on all ranks together" },
    { label: "again", value: (graph) => graph.recompiles, isNumber: true, title: "recompiled" },
    hasTime ? { label: "time", value: (graph) => graph.ms, cell: (graph) => duration(graph.ms), isNumber: true } : null,
    nameColumn("first at step", "step"),
    { label: "why again", value: (graph) => graph.reasons.length, cell: reasons },
  ].filter(Boolean);
  return sortedTable({ caption: "Compiled graphs", columns, rows: report.graphs, noun: "graph" });
}

const LOG_ROWS = 60;

function showLog(report) {
  const { ranks, rows, first_difference: first } = report.log;
  if (!rows.length)
    return nothing(
      "No note, exception or log line was recorded.",
      '`torchwhere.note("...")` writes one; `torchwhere.rank_log("...")` writes a file for each rank.',
    );
  const body = el("tbody");
  const more = el("p", { class: "more" });
  const show = (from, to) => {
    body.replaceChildren(...rows.slice(from, to).map((row, at) => logLine(row, from + at === first, from + at)));
    more.replaceChildren();
    more.hidden = from === 0 && to >= rows.length;
    if (!more.hidden)
      put(more, [
        `lines ${from + 1} to ${Math.min(to, rows.length)} of ${count(rows.length)}. `,
        button("Show all", () => show(0, rows.length)),
      ]);
  };
  const from =
    first === null || first === undefined
      ? Math.max(0, rows.length - LOG_ROWS)
      : Math.max(0, Math.min(first - 8, rows.length - LOG_ROWS));
  show(from, from + LOG_ROWS);
  const head = el(
    "tr",
    {},
    el("th", { scope: "col", class: "number" }, "step"),
    ranks.map((rank) => el("th", { scope: "col" }, `rank ${rank}`)),
  );
  const table = el(
    "table",
    { class: "log" },
    el("caption", { class: "unseen" }, "Notes and log lines, ranks side by side"),
    el("thead", {}, head),
    body,
  );
  const remark =
    first === null || first === undefined ? el("p", { class: "aside" }, "These ranks recorded the same lines.") : null;
  return [
    remark,
    el("div", { class: "scroll tall", tabindex: "0", role: "group", "aria-label": "Log and notes" }, table),
    more,
  ].filter(Boolean);
}

function logLine(row, isFirst, at) {
  const cells = row.cells.map((cell) => {
    if (!cell) return el("td", { class: "absent" }, "\u2014");
    return el(
      "td",
      {},
      cell[0] === "note" || cell[0] === "log" ? null : el("span", { class: "kind" }, cell[0], " "),
      name(cell[1], { longest: 160 }),
    );
  });
  const label = el(
    "td",
    { class: "number" },
    row.differs
      ? el("b", { title: row.how === "flow" ? "a rank has no such line" : "the same line with other values" }, "\u2260 ")
      : "",
    row.step === null ? "" : String(row.step),
  );
  const line = el(
    "tr",
    { class: isFirst ? "differs first" : row.how === "flow" ? "differs" : null, "data-line": at },
    label,
    cells,
  );
  if (isFirst) label.append(el("div", { class: "flag" }, "first difference"));
  return line;
}
