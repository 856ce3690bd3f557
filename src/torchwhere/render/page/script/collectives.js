/* Collectives of a chosen group: arrivals by rank and number, bytes by step, and the first difference. */

const MOST_TO_DIFFERENCE = 60; // rows shown at first to include the first difference
const LITTLE_MS = 1; // a smaller skew does not matter

function showCollectives(report) {
  const groups = report.collectives;
  if (!groups.length)
    return nothing(
      "No collective was recorded.",
      "A job of one process has none; `torchwhere run` records every call of `torch.distributed`.",
    );
  const place = el("div");
  const show = (at) => place.replaceChildren(...groupView(groups[Number(at)], report));
  const options = groups.map((group, at) => [String(at), groupTitle(group)]);
  show(0);
  const more = report.more_groups
    ? `${plural(report.more_groups, "more group")} in the boxes; these moved the most bytes, or are in the verdict`
    : "";
  return [
    el(
      "div",
      { class: "controls" },
      choice("Group", options, { value: "0", onchange: show }),
      el("span", { class: "found" }, more),
    ),
    place,
  ];
}

function groupTitle(group) {
  const members = group.members ? `: ${ranksText(group.members, 4)}` : "";
  return `${cut(inert(group.group), 32)}, ${plural(group.count ?? group.size, "rank")}${members}`;
}

function groupView(group, report) {
  const head = el(
    "p",
    { class: "aside" },
    name(group.desc && group.desc !== group.group ? group.desc : group.group),
    ": ",
    group.window,
  );
  const chart = group.bytes_per_step.length > 1 ? bytesChart(group.bytes_per_step) : null;
  return [
    head,
    difference(group.first_difference),
    group.rows.length ? arrivals(group, report) : null,
    chart,
    collectiveTable(group),
  ].filter(Boolean);
}

/* -- the first difference --------------------------------------------------------------------------------------------- */

function difference(first) {
  if (!first) return null;
  const cohorts = first.cohorts.map((cohort) =>
    el(
      "li",
      {},
      el("b", {}, `${cohort.ranks.length === 1 ? "rank" : "ranks"} ${ranksText(cohort.ranks)}`),
      ": ",
      name(cohort.what),
    ),
  );
  return el(
    "div",
    { class: "callout" },
    el("p", {}, el("b", {}, "\u25b2 First difference"), ` at #${first.number}: ranks issued different collectives.`),
    el("ul", {}, cohorts),
  );
}

/* -- arrivals --------------------------------------------------------------------------------------------------------- */

function arrivals(group, report) {
  const { rows, matrix } = group;
  if (!matrix || !matrix.ranks.length) return null;
  const culprits = new Set(report.verdict.culprits || []);
  const differs = new Set(group.first_difference ? [group.first_difference.number] : []);
  const map = new HeatMap({
    label: `Arrival at the collectives of ${group.group}: ranks down, numbers across`,
    rows: matrix.ranks.length,
    columns: rows.length,
    value: (row, column) => matrix.ms[row][column],
    rowLabel: (row) => `rank ${matrix.ranks[row]}`,
    columnLabel: (column) => `#${rows[column].number}`,
    isFlagged: (row) => culprits.has(matrix.ranks[row]),
    isMarked: (column) => rows[column].differs || differs.has(rows[column].number),
    leastMost: LITTLE_MS,
    absent: "not arrived, or overwritten in the ring",
    hint: rows.some((row) => row.differs) ? "\u25b2 ranks differ" : "",
    describe: (row, column) => {
      const late = matrix.ms[row][column];
      const { number, op, bytes, step, module, line } = rows[column];
      let when = late ? `arrived ${duration(late)} after the first` : "arrived first";
      if (late === null) when = "has not arrived, or its record was overwritten";
      return [
        `rank ${matrix.ranks[row]} at #${number}: ${when}`,
        `${op}, ${amount(bytes)}${step === null ? "" : `, step ${step}`}`,
        [module, line].filter(Boolean).join(", "),
      ];
    },
  });
  const size = group.count ?? group.size;
  const chosen =
    matrix.ranks.length < size
      ? ` (${matrix.ranks.length} of ${count(size)} ranks: the extremes and those that the verdict names)`
      : "";
  return el("figure", {}, el("figcaption", {}, `Arrival after the first rank${chosen}`), map.element);
}

/* -- bytes over steps ------------------------------------------------------------------------------------------------- */

function bytesChart(points) {
  const canvas = el("canvas", {
    role: "img",
    "aria-label": `Bytes per step, steps ${points[0][0]} to ${points[points.length - 1][0]}`,
  });
  const frame = el("div", { class: "chart" }, canvas);
  const most = points.reduce((largest, [, bytes]) => Math.max(largest, bytes), 1);
  const [left, height, base] = [64, 64, 18];
  const pitch = (width) => Math.min(28, (width - left) / points.length);
  redrawOnChange(frame, (width) => {
    const ctx = sized(canvas, width, height + base);
    ctx.font = `11px ${FONT}`;
    ctx.fillStyle = palette.get("--bar");
    points.forEach(([, bytes], at) => {
      const tall = (bytes / most) * (height - 6);
      ctx.fillRect(left + at * pitch(width), height - tall, Math.max(1, pitch(width) - 1), tall);
    });
    ctx.fillStyle = palette.get("--muted");
    ctx.textAlign = "right";
    ctx.fillText(amount(most), left - 6, 14);
    ctx.fillText("0", left - 6, height);
    ctx.textAlign = "left";
    ctx.fillText(`step ${points[0][0]}`, left, height + 14);
    if (points.length * pitch(width) > 140) {
      ctx.textAlign = "right";
      ctx.fillText(`step ${points[points.length - 1][0]}`, left + points.length * pitch(width), height + 14);
    }
  });
  frame.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const at = Math.floor((event.clientX - box.left - left) / pitch(box.width));
    if (at < 0 || at >= points.length) tip.hide();
    else tip.show([`step ${points[at][0]}`, `${amount(points[at][1])} by each rank`], event.clientX, event.clientY);
  });
  frame.addEventListener("pointerleave", () => tip.hide());
  return el("figure", {}, el("figcaption", {}, "Bytes per step, of one rank"), frame);
}

/* -- the numbers ------------------------------------------------------------------------------------------------------ */

function collectiveTable(group) {
  const mostSkew = group.rows.reduce((most, row) => Math.max(most, row.skew_ms || 0), LITTLE_MS);
  const mostBytes = group.rows.reduce((most, row) => Math.max(most, row.bytes || 0), 0);
  const arrived = (row) => `${count(row.arrived)} of ${count(row.of)}${row.arrived < row.of ? " \u25c6" : ""}`;
  const columns = [
    {
      label: "#",
      value: (row) => row.number,
      cell: (row) => [row.differs ? el("b", { title: "ranks differ here" }, "\u25b2 ") : "", String(row.number)],
      isNumber: true,
    },
    { label: "op", value: (row) => row.op, cell: (row) => name(row.op) },
    { label: "bytes", value: (row) => row.bytes, cell: (row) => amount(row.bytes), bar: (row) => row.bytes / mostBytes },
    nameColumn("step", "step"),
    { label: "module", value: (row) => row.module, cell: (row) => name(row.module, { longest: 60 }) },
    { label: "line", value: (row) => row.line, cell: (row) => name(row.line, { longest: 60 }) },
    { label: "arrived", value: (row) => row.arrived - row.of, cell: arrived, isNumber: true, title: "\u25c6: not all ranks" },
    timeColumn("skew", "skew_ms", {
      bar: (row) => row.skew_ms / mostSkew,
      title: "from the first arrival to the last",
    }),
    nameColumn("first rank", "first_rank"),
    nameColumn("last rank", "last_rank"),
  ];
  const first = group.rows.findIndex((row) => row.differs);
  const atFirst =
    first < 0 || group.rows.length - first > MOST_TO_DIFFERENCE ? 12 : Math.max(12, group.rows.length - first + 1);
  const rowClass = (row) => {
    if (row.differs) return "differs";
    return row.arrived < row.of ? "short" : null;
  };
  return sortedTable({
    caption: `Collectives of ${group.group}`,
    columns,
    rows: group.rows,
    sortBy: 0,
    atFirst,
    rowClass,
    noun: "number",
  });
}
