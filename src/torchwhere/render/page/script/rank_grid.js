/* Positions of the rank cells: in blocks of ranks that are grouped together, as large as fits. It draws nothing. */

const TILES = 24; // up to this many ranks are drawn as tiles
const TILE = { width: 196, most: 340, height: 62, gap: 6, line: 14 };
const CELL_SIZES = [44, 36, 30, 26, 22, 18, 16, 14, 12, 11, 10, 9, 8, 7, 6, 5];
const MOST_LABELS = 160; // groups
const HEIGHT = 560; // the map stays below this if possible

class RankGrid {
  constructor(ranks) {
    this.ranks = ranks;
    this.size = ranks.rank.length;
    this.groupBy = ranks.hosts.length > 1 && ranks.hosts.length <= MOST_LABELS ? "host" : "none";
  }

  groups() {
    const { ranks, groupBy } = this;
    if (groupBy === "none") return [{ label: "", members: ranks.rank.map((_, at) => at) }];
    const [of, names] = groupBy === "host" ? [ranks.host, ranks.hosts] : this.mesh();
    const groups = new Map();
    of.forEach((group, at) => {
      const key = group === null || group === undefined ? -1 : group;
      if (!groups.has(key)) groups.set(key, { label: key < 0 ? "in no group" : inert(names[key]), members: [] });
      groups.get(key).members.push(at);
    });
    return [...groups.values()];
  }

  mesh() {
    const mesh = this.ranks.meshes[Number(this.groupBy.slice(5))];
    return [mesh.of, mesh.groups.map((group) => `${mesh.name} ${group}`)];
  }

  arrange(width) {
    this.width = width;
    this.blocks = this.groups();
    this.hasLabels = this.groupBy !== "none" && this.blocks.length <= MOST_LABELS;
    if (this.size <= TILES) {
      const most = Math.max(...this.blocks.map((block) => block.members.length));
      const columns = Math.max(1, Math.min(most, Math.floor((width + TILE.gap) / (TILE.width + TILE.gap))));
      this.place(Math.min(TILE.most, (width + TILE.gap) / columns - TILE.gap), TILE.height + (this.ranks.devices ? TILE.line : 0), TILE.gap);
    } else {
      for (const size of CELL_SIZES) {
        if (this.place(size, size, size > 8 ? 2 : 1) <= HEIGHT) break;
      }
    }
  }

  /* Computes the corner of every cell. Returns the height of the map. */
  place(cellWidth, cellHeight, gap) {
    Object.assign(this, { cellWidth, cellHeight, gap });
    this.x = new Float32Array(this.size);
    this.y = new Float32Array(this.size);
    const top = this.hasLabels ? 16 : 0;
    const between = this.blocks.length > 1 ? Math.max(4, gap * 3) : 0;
    let [x, y, lineHeight] = [0, 0, 0];
    for (const block of this.blocks) {
      const columns = this.columnsOf(block, cellWidth + gap);
      const rows = Math.ceil(block.members.length / columns);
      const [blockWidth, blockHeight] = [this.blockWidth(columns, cellWidth + gap), top + rows * (cellHeight + gap)];
      if (x > 0 && x + blockWidth - gap > this.width) [x, y, lineHeight] = [0, y + lineHeight + between, 0];
      [block.x, block.y, block.width] = [x, y, blockWidth];
      block.members.forEach((rank, at) => {
        this.x[rank] = x + (at % columns) * (cellWidth + gap);
        this.y[rank] = y + top + Math.floor(at / columns) * (cellHeight + gap);
      });
      x += blockWidth + between;
      lineHeight = Math.max(lineHeight, blockHeight);
    }
    this.height = Math.ceil(y + lineHeight);
    return this.height;
  }

  columnsOf(block, pitch) {
    const room = Math.max(1, Math.floor((this.width + this.gap) / pitch));
    const eights = room >= 16 && this.size > TILES ? room - (room % 8) : room; // hosts often have eight ranks
    const size = block.members.length;
    const wanted = this.blocks.length === 1 || size <= 8 ? size : Math.max(8, Math.ceil(Math.sqrt(size * 2.5) / 8) * 8);
    return Math.max(1, Math.min(eights, wanted));
  }

  blockWidth(columns, pitch) {
    return this.hasLabels ? Math.max(columns * pitch, 84) : columns * pitch;
  }

  /* The rank at a point, or null. */
  at(x, y) {
    const [wide, high] = [this.cellWidth + this.gap, this.cellHeight + this.gap];
    for (let at = 0; at < this.size; at++) {
      const [right, down] = [x - this.x[at], y - this.y[at]];
      if (right >= 0 && right < wide && down >= 0 && down < high) return at;
    }
    return null;
  }

  /* The rank that a key leads to; null for other keys. */
  neighbour(from, key) {
    const order = this.blocks.flatMap((block) => block.members);
    const place = order.indexOf(from);
    if (key === "ArrowRight") return order[Math.min(this.size - 1, place + 1)];
    if (key === "ArrowLeft") return order[Math.max(0, place - 1)];
    if (key === "Home") return order[0];
    if (key === "End") return order[this.size - 1];
    return key === "ArrowUp" || key === "ArrowDown" ? this.vertical(from, key === "ArrowDown" ? 1 : -1) : null;
  }

  /* The nearest rank in the next row of that direction. */
  vertical(from, sign) {
    const [x, y] = [this.x[from], this.y[from]];
    let [best, bestBy] = [from, Infinity];
    for (let at = 0; at < this.size; at++) {
      const down = sign * (this.y[at] - y);
      const by = down * 4096 + Math.abs(this.x[at] - x);
      if (down > 0.5 && by < bestBy) [best, bestBy] = [at, by];
    }
    return best;
  }
}
