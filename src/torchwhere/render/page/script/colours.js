/* The colours of the style sheet, for canvases; read again when the theme changes. */

const palette = {
  colours: {},
  listeners: [],
  get(variable) {
    if (!(variable in this.colours)) {
      const probe = document.body.appendChild(el("i", { hidden: true }));
      probe.style.color = `var(${variable})`;
      this.colours[variable] = getComputedStyle(probe).color;
      probe.remove();
    }
    return this.colours[variable];
  },
  changed() {
    this.colours = {};
    for (const listener of this.listeners) listener();
  },
};

const HEATS = 7;

/* The colour for a share of the maximum, from 0 to 1, and the colour of text on it. */
function heat(part) {
  const at = Math.max(0, Math.min(HEATS - 1, Math.floor(part * HEATS)));
  return [palette.get(`--heat-${at}`), palette.get(at * 2 < HEATS ? "--heat-text-low" : "--heat-text-high")];
}

/* Sets the size of a canvas, in screen pixels, and returns its 2D context. */
function sized(canvas, width, height) {
  const ratio = Math.min(3, window.devicePixelRatio || 1);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.clearRect(0, 0, width, height);
  return ctx;
}

function fitText(ctx, text, width) {
  if (ctx.measureText(text).width <= width) return text;
  let low = 0;
  let high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (ctx.measureText(text.slice(0, middle) + "\u2026").width <= width) low = middle;
    else high = middle - 1;
  }
  return low ? text.slice(0, low) + "\u2026" : "";
}

/* Stripes, for values that are not known: no colour can be mistaken for them. */
function hatch(ctx, x, y, width, height) {
  ctx.save();
  ctx.beginPath();
  ctx.rect(x, y, width, height);
  ctx.clip();
  ctx.strokeStyle = palette.get("--hatch");
  ctx.lineWidth = 1;
  ctx.beginPath();
  for (let at = x - height; at < x + width; at += 4) {
    ctx.moveTo(at, y + height);
    ctx.lineTo(at + height, y);
  }
  ctx.stroke();
  ctx.restore();
}

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif';

/* Draws again when the width of the frame or the theme changes. */
function redrawOnChange(frame, draw) {
  let width = 0;
  new ResizeObserver(([{ contentRect }]) => {
    const now = Math.floor(contentRect.width);
    if (now && now !== width) draw((width = now));
  }).observe(frame);
  palette.listeners.push(() => width && draw(width));
}
