/* A table that its headings sort. A long table shows only its first rows at first.
 *
 * A column: {label, value(row) to sort by, cell(row) a text or node, bar(row) from 0 to 1, isNumber, isName, title}.
 * `isName`: ranks and steps are numbers used as names, so they get no separators: 10000, not 10,000. */

const ROWS_AT_FIRST = 100;

/* The column of a time in ms, which the rows hold under `key`. */
function timeColumn(label, key, more = {}) {
  return { label, value: (row) => row[key], cell: (row) => duration(row[key]), isNumber: true, ...more };
}

/* The column of a number that is used as a name. */
function nameColumn(label, key) {
  return { label, value: (row) => row[key], isNumber: true, isName: true };
}

function barCell(text, part) {
  const fill = el("span", { class: "fill" });
  fill.style.width = `${Math.max(0, Math.min(1, part || 0)) * 100}%`;
  return el("td", { class: "number bar" }, part > 0 ? fill : null, el("span", {}, text));
}

function tableCell(column, row) {
  const content = column.cell ? column.cell(row) : column.value(row);
  if (column.bar) return barCell(content, column.bar(row));
  const isCount = typeof content === "number" && !column.isName;
  const text = typeof content === "number" ? String(content) : content;
  return el("td", { class: column.isNumber ? "number" : null }, isCount ? count(content) : text);
}

function compared(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}

class SortedTable {
  constructor({
    caption,
    columns,
    rows,
    sortBy = null,
    isDown = true,
    atFirst = ROWS_AT_FIRST,
    rowClass = null,
    noun = "row",
  }) {
    Object.assign(this, {
      columns,
      rows,
      sortBy,
      isDown,
      rowClass,
      noun,
      shown: atFirst,
      portion: Math.max(atFirst, ROWS_AT_FIRST),
    });
    this.body = el("tbody");
    this.heads = columns.map((column, at) => this.heading(column, at));
    this.more = el("p", { class: "more" });
    const whole = el(
      "table",
      {},
      el("caption", { class: "unseen" }, caption),
      el("thead", {}, el("tr", {}, this.heads)),
      this.body,
    );
    this.element = el(
      "div",
      { class: "tableframe" },
      el("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": caption }, whole),
      this.more,
    );
    this.draw();
  }

  heading(column, at) {
    const sort = button(column.label, () => this.sort(at), { title: column.title });
    return el("th", { scope: "col", class: column.isNumber || column.bar ? "number" : null }, sort);
  }

  sort(at) {
    const isNumber = Boolean(this.columns[at].isNumber || this.columns[at].bar);
    this.isDown = this.sortBy === at ? !this.isDown : isNumber;
    this.sortBy = at;
    this.draw();
  }

  sorted() {
    if (this.sortBy === null) return this.rows;
    const { value } = this.columns[this.sortBy];
    const sign = this.isDown ? -1 : 1;
    const isKnown = (row) => value(row) !== null && value(row) !== undefined;
    const known = this.rows.filter(isKnown).sort((a, b) => sign * compared(value(a), value(b)));
    return known.concat(this.rows.filter((row) => !isKnown(row)));
  }

  draw() {
    this.heads.forEach((head, at) => {
      head.setAttribute("aria-sort", at !== this.sortBy ? "none" : this.isDown ? "descending" : "ascending");
    });
    const lines = this.sorted()
      .slice(0, this.shown)
      .map((row) => {
        return el(
          "tr",
          { class: this.rowClass ? this.rowClass(row) : null },
          this.columns.map((column) => tableCell(column, row)),
        );
      });
    this.body.replaceChildren(...lines);
    const left = this.rows.length - this.shown;
    this.more.replaceChildren();
    this.more.hidden = left <= 0;
    if (left > 0) {
      const next = Math.min(left, this.portion * 5);
      put(this.more, [
        `${count(this.shown)} of ${plural(this.rows.length, this.noun)}. `,
        button(`Show ${count(next)} more`, () => this.grow(next)),
      ]);
    }
  }

  grow(rows) {
    this.shown += rows;
    this.draw();
  }
}

function sortedTable(options) {
  return new SortedTable(options).element;
}
