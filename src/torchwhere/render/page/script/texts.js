/* Formats texts and numbers.
 *
 * Names come from a user's program and may hold anything. All of them pass `inert` on their way into the page: control and
 * direction characters become visible symbols. `cut` shortens absurd lengths; the title keeps the whole text. */

const LONGEST = 240;
const FITS = 36; // characters: the style sheet cuts no shorter text
const LONGEST_TITLE = 20000;

function inert(value) {
  return String(value).replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (character) => {
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return code === 0x7f ? "\u2421" : "\ufffd";
  });
}

function cut(text, longest = LONGEST) {
  return text.length <= longest ? text : text.slice(0, longest).replace(/[\ud800-\udbff]$/, "") + "\u2026";
}

function count(value) {
  return value === null || value === undefined ? "" : Number(value).toLocaleString("en-US");
}

function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

function amount(bytes) {
  if (bytes === null || bytes === undefined) return "";
  let left = Number(bytes);
  for (const unit of ["B", "KB", "MB", "GB", "TB"]) {
    if (left < 999.5) return `${unit === "B" || left >= 99.95 ? left.toFixed(0) : left.toFixed(1)} ${unit}`;
    left /= 1000;
  }
  return `${left.toFixed(1)} PB`;
}

function duration(ms) {
  if (ms === null || ms === undefined) return "";
  const size = Math.abs(ms);
  if (size === 0) return "0 ms";
  if (size < 0.9995) return `${(ms * 1000).toFixed(0)} \u00b5s`;
  if (size < 999.5) return `${ms.toFixed(size < 99.95 ? 1 : 0)} ms`;
  if (size < 999500) return `${(ms / 1000).toFixed(size < 99995 ? 2 : 0)} s`;
  return size < 6e6 ? `${(ms / 60000).toFixed(1)} min` : `${(ms / 3.6e6).toFixed(1)} h`;
}

function share(part) {
  return part === null || part === undefined ? "" : `${(100 * part).toFixed(part < 0.0995 ? 1 : 0)}%`;
}

/* Ranks in order with runs folded: 0-3, 8. The same spelling as core/rank_text.py. */
function ranksText(ranks, most = 24) {
  const runs = [];
  for (const rank of [...ranks].sort((a, b) => a - b)) {
    const last = runs[runs.length - 1];
    if (last && rank === last[1] + 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  const texts = runs.slice(0, most).map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`));
  const hidden = runs.slice(most).reduce((ranks, [first, last]) => ranks + last - first + 1, 0);
  return texts.join(", ") + (hidden ? ` and ${hidden} more` : "");
}
