/* The module tree: time, calls, collectives and bytes of each pass. The report has already folded repeats.
 *
 * Sorting sorts siblings, so the tree stays a tree. Searching shows the matching modules and their parents. */

const MEASURES = {
  ms: ["time", duration],
  calls: ["calls", count],
  collectives: ["collectives", count],
  bytes: ["bytes", amount],
};
const OPEN_AT_FIRST = 40; // rows
const MOST_ROWS = 1500;

class ModuleTree {
  constructor(modules) {
    this.rows = modules.rows.map((row, at) => ({ ...row, at, children: [] }));
    this.roots = [];
    for (const row of this.rows) (row.parent >= 0 ? this.rows[row.parent].children : this.roots).push(row);
    this.columns = this.columnsOf(modules);
    this.most = this.columns.map(([pass, key]) =>
      this.rows.reduce((most, row) => Math.max(most, cellOf(row, pass, key) || 0), 0),
    );
    this.sortBy = null;
    this.isDown = true;
    this.wanted = "";
    this.open = new Set();
    this.openSome();
    this.build(modules);
  }

  columnsOf(modules) {
    const has = (pass, key) => this.rows.some((row) => cellOf(row, pass, key));
    return modules.passes.flatMap((pass) =>
      Object.keys(MEASURES)
        .filter((key) => has(pass, key))
        .map((key) => [pass, key]),
    );
  }

  openSome() {
    let [level, shown] = [this.roots, this.roots.length];
    while (level.length) {
      const next = level.flatMap((row) => row.children);
      if (shown + next.length > OPEN_AT_FIRST && shown > 4) return;
      for (const row of level) this.open.add(row.at);
      shown += next.length;
      level = next;
    }
  }

  build(modules) {
    const passes = modules.passes.filter((pass) => this.columns.some(([other]) => other === pass));
    const spans = passes.map((pass) =>
      el(
        "th",
        { scope: "colgroup", class: "pass", colspan: this.columns.filter(([other]) => other === pass).length },
        name(pass, { mono: false }),
      ),
    );
    this.heads = this.columns.map(([pass, key], at) =>
      el(
        "th",
        { scope: "col", class: this.edge("number", at) },
        button(MEASURES[key][0], () => this.sort(at), { title: `Sort by ${MEASURES[key][0]} of ${pass}` }),
      ),
    );
    this.nameHead = el(
      "th",
      { scope: "col", rowspan: 2, class: "sticky" },
      button("module", () => this.sort(null), { title: "In the order of the model" }),
    );
    this.body = el("tbody");
    this.status = el("span", { class: "found", role: "status" });
    const head = el("thead", {}, el("tr", {}, this.nameHead, spans), el("tr", {}, this.heads));
    const whole = el("table", { class: "tree" }, el("caption", { class: "unseen" }, "Modules"), head, this.body);
    const controls = el(
      "div",
      { class: "controls" },
      searchBox("Search", {
        placeholder: "part of a name",
        oninput: (text) => ((this.wanted = text.toLowerCase()), this.draw()),
      }),
      button("Expand all", () => this.openAll(true)),
      button("Collapse all", () => this.openAll(false)),
      this.status,
    );
    this.element = el(
      "div",
      {},
      controls,
      el("div", { class: "scroll tall", tabindex: "0", role: "group", "aria-label": "Module tree" }, whole),
    );
    this.draw();
  }

  edge(kind, at) {
    return at === 0 || this.columns[at][0] !== this.columns[at - 1][0] ? `${kind} edge` : kind;
  }

  sort(at) {
    this.isDown = this.sortBy === at ? !this.isDown : true;
    this.sortBy = at;
    this.draw();
  }

  openAll(isOpen) {
    this.open = new Set(isOpen ? this.rows.map((row) => row.at) : []);
    this.draw();
  }

  ordered(rows) {
    if (this.sortBy === null) return rows;
    const [pass, key] = this.columns[this.sortBy];
    const sign = this.isDown ? -1 : 1;
    return [...rows].sort((a, b) => sign * ((cellOf(a, pass, key) || 0) - (cellOf(b, pass, key) || 0)));
  }

  draw() {
    const mark = (head, isBy) => head.setAttribute("aria-sort", !isBy ? "none" : this.isDown ? "descending" : "ascending");
    this.heads.forEach((head, at) => mark(head, at === this.sortBy));
    const matching = this.wanted ? this.matching() : null;
    const lines = [];
    const walk = (rows, depth) => {
      for (const row of this.ordered(rows)) {
        if (lines.length >= MOST_ROWS || (matching && !matching.has(row.at))) continue;
        const isOpen = matching
          ? row.children.some((child) => matching.has(child.at)) || this.open.has(row.at)
          : this.open.has(row.at);
        lines.push(this.line(row, depth, isOpen));
        if (isOpen) walk(row.children, depth + 1);
      }
    };
    walk(this.roots, 0);
    this.body.replaceChildren(...lines);
    this.describe(matching, lines.length);
  }

  describe(matching, shown) {
    if (matching)
      this.status.textContent = this.found ? `${plural(this.found, "module")} found` : "no module name contains that";
    else this.status.textContent = shown >= MOST_ROWS ? `the first ${count(shown)} rows; search for more` : "";
  }

  /* The modules whose names match, and all their parents. */
  matching() {
    const rows = new Set();
    this.found = 0;
    for (const row of this.rows) {
      if (!row.name.toLowerCase().includes(this.wanted)) continue;
      this.found++;
      for (let at = row.at; at >= 0 && !rows.has(at); at = this.rows[at].parent) rows.add(at);
    }
    return rows;
  }

  line(row, depth, isOpen) {
    const label = el(
      "th",
      { scope: "row", class: "sticky" },
      this.twisty(row, isOpen),
      name(shortModule(row, this.rows), { longest: 90 }),
      row.times > 1 ? el("span", { class: "times", title: "this many modules are alike" }, ` \u00d7${row.times}`) : null,
    );
    label.style.paddingLeft = `${6 + depth * 16}px`;
    const cells = this.columns.map(([pass, key], at) => {
      const value = cellOf(row, pass, key);
      const cell = barCell(value ? MEASURES[key][1](value) : "", this.most[at] ? (value || 0) / this.most[at] : 0);
      cell.className = this.edge(cell.className, at);
      return cell;
    });
    return el("tr", {}, label, cells);
  }

  twisty(row, isOpen) {
    if (!row.children.length) return el("span", { class: "twisty" });
    const turn = (to) => {
      if (to) this.open.add(row.at);
      else this.open.delete(row.at);
      this.draw();
      this.body.querySelector(`[data-row="${row.at}"]`)?.focus();
    };
    const made = button(isOpen ? "\u25be" : "\u25b8", () => turn(!isOpen), {
      class: "twisty",
      "data-row": row.at,
      "aria-expanded": String(isOpen),
      "aria-label": `${isOpen ? "Collapse" : "Expand"} ${cut(row.name, 80)}`,
    });
    made.addEventListener("keydown", (event) => {
      if (event.key === "ArrowRight" && !isOpen) turn(true);
      if (event.key === "ArrowLeft" && isOpen) turn(false);
    });
    return made;
  }
}

function cellOf(row, pass, key) {
  const cells = row.cells[pass];
  return cells ? cells[key] : null;
}

/* The name of a module without its parent's. */
function shortModule(row, rows) {
  const above = row.parent >= 0 ? rows[row.parent].name : "";
  const rest = above && row.name.startsWith(`${above}.`) ? row.name.slice(above.length + 1) : row.name;
  return rest || "<root>";
}

function showModules(report) {
  const { modules } = report;
  if (!modules.rows.length)
    return nothing(
      "No module was recorded.",
      "Collectives record the module that issued them; `torchwhere run --module-events` records every module call.",
    );
  return [new ModuleTree(modules).element, modules.note ? el("p", { class: "aside" }, codes(modules.note)) : null];
}
