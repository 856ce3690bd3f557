/* The device of each rank: the parts of its usual step as a bar, and each part by step and rank. */

/* A part of a step: its key, its label, and what it means. They add up to the step. */
const DEVICE_PARTS = [
  ["compute", "compute, idle", "no collective was in flight"],
  ["hidden", "hidden", "a collective that is asynchronous or has its own stream was in flight, and the job continued"],
  ["unclear", "unclear", "such a collective was in flight; it is not known whether the job computed or waited for it"],
  ["exposed", "exposed", "a collective blocked the stream of the job, or the stream waited for it"],
];

function showDevice(report) {
  const { device } = report;
  const place = el("div");
  const show = (part) => place.replaceChildren(deviceMap(device, part));
  show("waited");
  const options = [
    ["waited", "time waited for another device"],
    ["device", "time of the step"],
    ...DEVICE_PARTS.map(([key, label]) => [key, label]),
  ];
  return [
    deviceTable(device),
    deviceLegend(),
    deviceRemarks(device),
    el("div", { class: "controls" }, choice("Colour by", options, { value: "waited", onchange: show })),
    place,
  ].flat();
}

function deviceTable(device) {
  const rows = device.ranks.map((rank, at) => ({ rank, ...device.usual[at] }));
  const most = rows.reduce((largest, row) => Math.max(largest, row.device), 0);
  const columns = [
    nameColumn("rank", "rank"),
    timeColumn("step", "device", { title: "median of its steps" }),
    { label: "parts", value: (row) => row.compute, cell: (row) => partsBar(row, most) },
    ...DEVICE_PARTS.map(([key, label, title]) => timeColumn(label, key, { title })),
    timeColumn("waited", "waited", { title: "in its collectives, for the device of another rank" }),
    { label: "waited for", value: (row) => row.waited_for, cell: waitedFor },
  ];
  return sortedTable({ caption: "The usual step of each device", columns, rows, noun: "rank" });
}

function waitedFor(row) {
  if (row.waited_for === null || row.waited < 0.01 * row.device) return "";
  return `rank ${row.waited_for} in ${plural(row.waited_steps, "step")}`;
}

function partsBar(row, most) {
  const parts = DEVICE_PARTS.map(([key]) => {
    const part = el("span", { class: `part-${key}` });
    part.style.width = `${(100 * row[key]) / most}%`;
    return part;
  });
  return el("div", { class: "parts", "aria-hidden": "true" }, parts);
}

/* A line for each part: its meaning is a sentence, which must wrap on a phone. */
function deviceLegend() {
  return DEVICE_PARTS.map(([key, label, meaning]) =>
    el("p", { class: "aside" }, el("span", { class: `swatch part-${key}` }), ` ${label}: ${meaning}`),
  );
}

function deviceRemarks(device) {
  const open = device.usual.reduce((sum, row) => sum + row.open_calls, 0);
  const ends = `The end of ${plural(open, "collective")} was not recorded. Each counts only until the last device reached it; a send, a recv or a collective with a root counts as compute. `;
  return el("p", { class: "aside" }, open ? ends : "", "Devices are compared by ", name(device.clocks, { mono: false }), ".");
}

function deviceMap(device, part) {
  const ms = device.ms[part];
  const map = new HeatMap({
    label: "Time of the devices: ranks down, steps across",
    rows: device.ranks.length,
    columns: device.steps.length,
    fromLeast: part === "device",
    value: (row, column) => ms[row][column],
    rowLabel: (row) => `rank ${device.ranks[row]}`,
    columnLabel: (column) => String(device.steps[column]),
    describe: (row, column) => [
      `rank ${device.ranks[row]}, step ${device.steps[column]} on the device`,
      ...[["device", "time"], ...DEVICE_PARTS, ["waited", "waited"]].map(([key, label]) => {
        const value = device.ms[key][row][column];
        return value === null ? "" : `${label} ${duration(value)}`;
      }),
    ],
  });
  return map.element;
}
