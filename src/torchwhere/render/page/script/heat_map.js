/* A heat map: rows by columns, darker is more. It works with the pointer, with arrow keys, and with screen readers.
 *
 * Takes {label, rows, columns, value(row, column) or null, rowLabel, columnLabel, describe(row, column) lines, isFlagged(row),
 * isMarked(column), format(value), fromLeast, leastMost}. Values over four times the 90th percentile share the last colour:
 * one slow compilation must not hide all other differences. */

const GUTTER = 92;
const FLAG = "\u25b8";

class HeatMap {
  constructor(options) {
    Object.assign(
      this,
      { rowLabel: String, columnLabel: String, isFlagged: () => false, isMarked: () => false, format: duration },
      options,
    );
    this.at = null;
    this.rescale();
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.status = liveRegion();
    this.frame = el(
      "div",
      {
        class: "heatmap",
        tabindex: "0",
        role: "application",
        "aria-roledescription": "heat map",
        "aria-label": `${options.label}. Arrow keys move.`,
      },
      this.canvas,
      this.status,
    );
    this.legend = el("p", { class: "legend" });
    this.element = el("div", {}, this.frame, this.legend);
    this.listen();
    redrawOnChange(this.frame, (width) => this.draw(width));
  }

  rescale() {
    const all = [];
    for (let row = 0; row < this.rows; row++) {
      for (let column = 0; column < this.columns; column++) {
        const value = this.value(row, column);
        if (value !== null && value !== undefined) all.push(value);
      }
    }
    all.sort((a, b) => a - b);
    const [first, last, high] = all.length ? [all[0], all[all.length - 1], all[Math.floor(0.9 * (all.length - 1))]] : [0, 0, 0];
    this.least = this.fromLeast ? first : Math.min(0, first);
    this.most = Math.min(last, 4 * high || last);
    this.isCut = this.most < last;
    this.most = Math.max(this.most, this.fromLeast ? 1.3 * first : this.leastMost || 0); // small differences must not look large
    this.known = all.length;
  }

  draw(width) {
    this.width = width;
    const room = width - GUTTER - 2;
    this.cellWidth = Math.min(56, room / this.columns);
    this.cellHeight = Math.max(3, Math.min(20, 420 / this.rows));
    const height = Math.ceil(this.rows * this.cellHeight) + 18;
    const ctx = sized(this.canvas, width, height);
    ctx.font = `11px ${FONT}`;
    ctx.textBaseline = "middle";
    for (let row = 0; row < this.rows; row++) this.drawRow(ctx, row);
    this.drawRowLabels(ctx);
    this.drawColumnLabels(ctx);
    if (this.at) this.outline(ctx, ...this.at);
    this.drawLegend();
  }

  drawRow(ctx, row) {
    const gap = this.cellWidth > 6 ? 1 : 0;
    const down = this.cellHeight > 5 ? 1 : 0;
    const y = row * this.cellHeight;
    for (let column = 0; column < this.columns; column++) {
      const x = GUTTER + column * this.cellWidth;
      const value = this.value(row, column);
      if (value === null || value === undefined) {
        hatch(ctx, x, y, this.cellWidth - gap, this.cellHeight - down);
        if (this.hasRoom()) this.write(ctx, "none", palette.get("--text"), x, y, palette.get("--page"));
        continue;
      }
      const [fill, text] = heat(this.part(value));
      ctx.fillStyle = fill;
      ctx.fillRect(x, y, this.cellWidth - gap, this.cellHeight - down);
      if (this.hasRoom()) this.write(ctx, this.format(value), text, x, y);
    }
  }

  hasRoom() {
    return this.cellWidth >= 46 && this.cellHeight >= 14;
  }

  write(ctx, text, colour, x, y, behind = null) {
    ctx.textAlign = "center";
    if (behind) {
      const width = ctx.measureText(text).width + 4;
      ctx.fillStyle = behind;
      ctx.fillRect(x + (this.cellWidth - width) / 2, y + 2, width, this.cellHeight - 5);
    }
    ctx.fillStyle = colour;
    ctx.fillText(text, x + this.cellWidth / 2, y + this.cellHeight / 2, this.cellWidth - 4);
  }

  drawRowLabels(ctx) {
    ctx.textAlign = "right";
    for (const [row, isFlagged] of spaced(this.rows, 15 / this.cellHeight, this.isFlagged)) {
      ctx.fillStyle = palette.get(isFlagged ? "--text" : "--muted");
      ctx.font = `${isFlagged ? "600 " : ""}11px ${FONT}`;
      const text = (isFlagged ? `${FLAG} ` : "") + inert(this.rowLabel(row));
      ctx.fillText(fitText(ctx, text, GUTTER - 8), GUTTER - 6, Math.max(6, (row + 0.5) * this.cellHeight));
    }
    ctx.font = `11px ${FONT}`;
  }

  drawColumnLabels(ctx) {
    const texts = [0, this.columns - 1].map((column) => ctx.measureText(`\u25b2 ${inert(this.columnLabel(column))}`).width);
    const room = Math.min(140, Math.max(...texts) + 6);
    ctx.textAlign = "center";
    for (const [column, isMarked] of spaced(this.columns, room / this.cellWidth, this.isMarked)) {
      const text = fitText(ctx, (isMarked ? "\u25b2 " : "") + inert(this.columnLabel(column)), room);
      const half = ctx.measureText(text).width / 2;
      const x = Math.min(this.width - half - 1, GUTTER + (column + 0.5) * this.cellWidth);
      ctx.fillStyle = palette.get(isMarked ? "--warn" : "--muted");
      ctx.fillText(text, x, this.rows * this.cellHeight + 10);
    }
  }

  part(value) {
    return this.most > this.least ? (value - this.least) / (this.most - this.least) : 0;
  }

  drawLegend() {
    const steps = Array.from({ length: HEATS }, (_, at) => {
      const box = el("span", { class: "swatch" });
      box.style.background = heat((at + 0.5) / HEATS)[0];
      return box;
    });
    const unknown =
      this.known < this.rows * this.columns ? [el("span", { class: "swatch hatched" }), this.absent || "not recorded"] : [];
    this.legend.replaceChildren();
    put(this.legend, [
      this.format(this.least) || "0",
      " ",
      steps,
      " ",
      this.format(this.most),
      this.isCut ? " and more " : " ",
      unknown,
      this.hint ? ` ${this.hint}` : "",
    ]);
  }

  outline(ctx, row, column) {
    ctx.strokeStyle = palette.get("--focus");
    ctx.lineWidth = 2;
    ctx.strokeRect(
      GUTTER + column * this.cellWidth - 0.5,
      row * this.cellHeight - 0.5,
      this.cellWidth,
      Math.max(3, this.cellHeight),
    );
  }

  listen() {
    this.frame.addEventListener("pointermove", (event) => this.hover(event));
    this.frame.addEventListener("pointerleave", () => tip.hide());
    this.frame.addEventListener("blur", () => tip.hide());
    this.frame.addEventListener("keydown", (event) => this.key(event));
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - GUTTER) / this.cellWidth);
    const row = Math.floor((event.clientY - box.top) / this.cellHeight);
    if (row < 0 || row >= this.rows || column < 0 || column >= this.columns) tip.hide();
    else tip.show(this.describe(row, column), event.clientX, event.clientY);
  }

  key(event) {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === "Escape") tip.hide();
    if (!move) return;
    event.preventDefault();
    const [row, column] = this.at ? [this.at[0] + move[0], this.at[1] + move[1]] : [0, this.columns - 1];
    this.at = [Math.max(0, Math.min(this.rows - 1, row)), Math.max(0, Math.min(this.columns - 1, column))];
    this.draw(this.width);
    const box = this.canvas.getBoundingClientRect();
    const lines = this.describe(...this.at);
    tip.show(lines, box.left + GUTTER + (this.at[1] + 1) * this.cellWidth, box.top + (this.at[0] + 1) * this.cellHeight);
    this.status.textContent = lines.map(inert).join(", ");
  }
}

/* Chooses which of `size` positions get a label, at least `apart` from each other: marked ones first. */
function spaced(size, apart, isMarked) {
  const labels = [];
  const isFree = (at) => labels.every(([other]) => Math.abs(other - at) >= apart);
  for (let at = size - 1; at >= 0; at--) if (isMarked(at) && isFree(at)) labels.push([at, true]);
  for (let at = 0; at < size; at += Math.max(1, Math.ceil(apart))) if (isFree(at)) labels.push([at, false]);
  return labels;
}
