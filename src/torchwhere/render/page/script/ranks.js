/* The section of the ranks: the map with its controls, the card of the selected rank, and a table of all ranks. */

function showRanks(report) {
  const { ranks } = report;
  if (!ranks.rank.length)
    return nothing("No rank is known.", "A run's folder holds `rank<N>.box` files; `torchwhere run` writes them.");
  const card = el("div", { class: "card", "aria-live": "polite" });
  const map = new RankMap(report, (at) => card.replaceChildren(...rankCard(report, at)));
  const first = ranks.rank.findIndex((rank) => map.culprits.has(rank));
  map.focused = map.selected = Math.max(0, first);
  card.replaceChildren(...rankCard(report, map.selected));
  const table = fold("All ranks as a table", () => rankTable(report, map));
  linkCulprits(map);
  const shape = ranks.rank.length <= TILES ? "mapandcard few" : "mapandcard";
  return [rankControls(report, map), el("div", { class: shape }, el("div", {}, map.frame, map.legend), card), table];
}

function rankControls(report, map) {
  const colours = [
    ["state", "state"],
    ["behind", "steps behind"],
    ["calls", "collectives behind"],
    ["age", "age of its last record"],
  ];
  const groups = [
    ["none", "rank"],
    ["host", "host"],
    ...report.ranks.meshes.map((mesh, at) => [`mesh ${at}`, `mesh dimension ${mesh.name}`]),
  ];
  const status = el("span", { class: "found", role: "status" });
  return el(
    "div",
    { class: "controls" },
    choice("Colour by", colours, { value: "state", onchange: (value) => map.colour(value) }),
    choice("Group by", groups, { value: map.grid.groupBy, onchange: (value) => map.group(value) }),
    searchBox("Find", {
      placeholder: "rank or host",
      oninput: (text) => findRank(map, text, status),
      onenter: () => map.frame.focus(),
    }),
    status,
  );
}

function findRank(map, text, status) {
  status.textContent = "";
  if (!text) return;
  const { ranks } = map;
  const wanted = text.toLowerCase();
  let at = ranks.rank.indexOf(/^\d+$/.test(text) ? Number(text) : -1);
  if (at < 0) {
    const host = ranks.hosts.findIndex((name) => name.toLowerCase().includes(wanted) && !/^\d+$/.test(text));
    at = host < 0 ? -1 : ranks.host.indexOf(host);
  }
  if (at < 0) status.textContent = `no such rank; there are ranks ${ranks.rank[0]} to ${ranks.rank[map.size - 1]}`;
  else map.select(at);
}

/* Links the ranks that the verdict names to their cells. */
function linkCulprits(map) {
  for (const link of document.querySelectorAll("a[data-rank]")) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      const at = map.ranks.rank.indexOf(Number(link.dataset.rank));
      if (at < 0) return;
      document.getElementById("ranks").scrollIntoView();
      map.select(at);
      map.frame.focus({ preventScroll: true });
    });
  }
}

/* -- one rank -------------------------------------------------------------------------------------------------------- */

function rankCard(report, at) {
  const { ranks } = report;
  const rank = ranks.rank[at];
  const details = report.details[rank];
  const state = knownState(ranks.states[ranks.state[at]]);
  const head = el("h3", {}, `Rank ${rank} `, stateMark(state, STATES[state][0]), ` ${state}`);
  const [stack, events] = details
    ? [stackOf(details, report.settings.folder), eventsOf(details, ranks.rank.length <= TILES)]
    : [noDetails(rank), null];
  return [el("div", {}, head, rankFacts(report, at, details), stack), events].filter(Boolean);
}

function rankFacts(report, at, details) {
  const { ranks } = report;
  const number = ranks.last_number[at];
  const last = ranks.lasts[ranks.last[at]];
  const facts = [
    [ranks.devices ? "CPU" : "place", name(ranks.places[ranks.place[at]])],
    ["device", devicePlace(ranks, at) && name(devicePlace(ranks, at))],
    ["device behind its CPU", ranks.devices ? lag(ranks.device_behind[at], ranks.device_behind_calls[at]) : ""],
    ["detail", details && details.detail ? name(details.detail, { mono: false }) : null],
    ["step", ranks.step[at] === null ? null : String(ranks.step[at])],
    ["behind the furthest rank", lag(ranks.behind[at], ranks.behind_calls[at])],
    ["last call", last ? [name(last), number === null ? "" : ` #${number}`] : null],
    ["last record", ageText(ranks.age_ms[at])],
    ["memory", details && details.memory ? name(details.memory, { mono: false }) : null],
    ["GPU", (details && details.gpus ? details.gpus : []).map((gpu) => [name(gpu, { mono: false }), "  "])],
    ["host", [name(ranks.hosts[ranks.host[at]]), ranks.pid[at] === null ? "" : `, pid ${ranks.pid[at]}`]],
    [
      "groups",
      ranks.meshes
        .filter((mesh) => mesh.of[at] !== null && mesh.of[at] !== undefined)
        .map((mesh) => [name(`${mesh.name} ${mesh.groups[mesh.of[at]]}`), "  "]),
    ],
  ];
  const shown = facts.filter(([, value]) => value !== null && value !== "" && !(Array.isArray(value) && !value.length));
  return el(
    "dl",
    { class: "facts" },
    shown.flatMap(([key, value]) => [el("dt", {}, key), el("dd", {}, ...[value].flat(2))]),
  );
}

/* "2 steps and 14 collectives"; empty if there is no lag. */
function lag(steps, calls) {
  return [steps && plural(steps, "step"), calls && plural(calls, "collective")].filter(Boolean).join(" and ");
}

/* The last point that the device of a rank has reached; null if it is not known. */
function devicePlace(ranks, at) {
  const text = ranks.devices && ranks.devices[ranks.device[at]];
  if (!text) return null;
  return ranks.device_step[at] === null ? text : `${text}, step ${ranks.device_step[at]}`;
}

function ageText(ms) {
  if (ms === null) return null;
  return ms ? `${duration(ms)} before the newest of all ranks` : "the newest of all ranks";
}

function stackOf({ stack }, folder) {
  if (!stack || !stack.length) return null;
  return [
    el("h4", {}, "Stack, innermost first"),
    el(
      "ol",
      { class: "stack" },
      stack.map((line) => el("li", {}, name(shortPath(line, folder)))),
    ),
  ];
}

function eventsOf({ events }, isWide) {
  return events && events.length
    ? el("div", {}, el("h4", {}, `Last ${plural(events.length, "event")}`), eventTable(events, isWide))
    : null;
}

/* A path below the job's folder, or below site-packages for an installed package. */
function shortPath(line, folder) {
  const whole = String(line);
  const at = whole.lastIndexOf("/site-packages/");
  if (at >= 0) return whole.slice(at + "/site-packages/".length);
  return folder && whole.startsWith(`${folder}/`) ? whole.slice(folder.length + 1) : whole;
}

function eventTable(events, isWide) {
  const place = (row) => name(row[3], { longest: 90 });
  const event = (row) => [
    el("span", { class: "kind" }, name(row[1], { longest: 40, mono: false }), " "),
    name(row[2], { longest: 120 }),
    isWide ? null : el("div", { class: "kind" }, place(row)),
  ];
  const columns = [
    {
      label: "ago",
      value: (row) => row[0],
      cell: (row) => (row[0] === null ? "" : duration(-row[0])),
      isNumber: true,
      title: "before the newest record of all ranks",
    },
    { label: "event", value: (row) => `${row[1]} ${row[2]}`, cell: event },
    isWide ? { label: "place", value: (row) => row[3], cell: place } : null,
  ].filter(Boolean);
  return sortedTable({
    caption: "Last events of this rank, the newest first",
    columns,
    rows: [...events].reverse(),
    atFirst: 12,
    noun: "event",
  });
}

function noDetails(rank) {
  return el(
    "p",
    { class: "nothing" },
    "This page has the stack and events only of the ranks that the verdict names, and of one of each kind. ",
    codes(`\`torchwhere events FOLDER --rank ${rank} --last 30\` prints those of this rank.`),
  );
}

/* -- all of them ------------------------------------------------------------------------------------------------------ */

function rankTable(report, map) {
  const { ranks } = report;
  const open = (at) =>
    button(String(ranks.rank[at]), () => (map.select(at), map.frame.scrollIntoView({ block: "nearest" })), { class: "link" });
  const columns = [
    { label: "rank", value: (at) => ranks.rank[at], cell: open, isNumber: true },
    {
      label: "state",
      value: (at) => map.state(at),
      cell: (at) => [stateMark(map.state(at), STATES[map.state(at)][0]), " ", map.state(at)],
    },
    { label: "step", value: (at) => ranks.step[at], isNumber: true, isName: true },
    { label: "steps behind", value: (at) => ranks.behind[at], isNumber: true },
    { label: "calls behind", value: (at) => ranks.behind_calls[at], isNumber: true },
    {
      label: "place",
      value: (at) => ranks.places[ranks.place[at]],
      cell: (at) => name(ranks.places[ranks.place[at]], { longest: 80 }),
    },
    ranks.devices
      ? {
          label: "device",
          value: (at) => devicePlace(ranks, at),
          cell: (at) => name(devicePlace(ranks, at), { longest: 80 }),
          title: "the last place that the device has reached",
        }
      : null,
    {
      label: "last call",
      value: (at) => ranks.lasts[ranks.last[at]],
      cell: (at) => name(ranks.lasts[ranks.last[at]], { longest: 60 }),
    },
    { label: "#", value: (at) => ranks.last_number[at], isNumber: true, isName: true },
    {
      label: "host",
      value: (at) => ranks.hosts[ranks.host[at]],
      cell: (at) => name(ranks.hosts[ranks.host[at]], { longest: 40 }),
    },
    {
      label: "last record",
      value: (at) => ranks.age_ms[at],
      cell: (at) => duration(ranks.age_ms[at]),
      isNumber: true,
      title: "before the newest of all ranks",
    },
  ].filter(Boolean);
  return sortedTable({ caption: "All ranks", columns, rows: ranks.rank.map((_, at) => at), noun: "rank" });
}
