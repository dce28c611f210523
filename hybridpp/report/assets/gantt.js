// The timeline of the ranks.
// The first row that ends after a time; rows are sorted by start, and rows of a rank do not overlap.
function firstVisible(rows, time, end) {
  let low = 0, high = rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle][end] < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

function shade(kind, stage, stagesHere) {
  if (!COMPUTES.includes(kind)) return [colors.communication, 1];
  const chunk = stagesHere.indexOf(stage);
  return [colors[kind], stagesHere.length > 1 ? 1 - (0.45 * chunk) / (stagesHere.length - 1) : 1];
}

const stagesOf = data.ranks.map((rank) => [...new Set(rank.actions.map((row) => row[STAGE]))].sort((a, b) => a - b));
const heightOf = () => (showsPredicted ? Math.round(1.7 * rowHeight) : rowHeight);
function gapBefore(index) {
  // A gap between pipelines.
  let gaps = 0;
  for (let at = 1; at <= index; at++) {
    const [one, other] = [data.ranks[at - 1].place, data.ranks[at].place];
    if (one[0] !== other[0] || one[2] !== other[2]) gaps++;
  }
  return 8 * gaps;
}
const gaps = data.ranks.map((_, index) => gapBefore(index));
const topOf = (index) => TOP + index * heightOf() + gaps[index];

let drawn = 0;
function hatch(pen, x, y, width, height) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  pen.globalAlpha = 0.22;
  pen.fillStyle = colors.messages;
  pen.fillRect(x, y, width, height);
  pen.globalAlpha = 0.75;
  pen.strokeStyle = colors.messages;
  pen.lineWidth = 1;
  pen.beginPath();
  for (let at = x - height; at < x + width; at += 6) {
    pen.moveTo(at, y + height);
    pen.lineTo(at + height, y);
  }
  pen.stroke();
  pen.restore();
}

function box(pen, row, kind, times, y, height, width, stagesHere, solid) {
  const left = Math.max(LEFT, xOf(times[0], width)), right = Math.min(width, xOf(times[1], width));
  if (right < LEFT || left > width) return;
  const wide = Math.max(right - left, 0.6), [color, alpha] = shade(kind, row[STAGE], stagesHere);
  pen.globalAlpha = alpha;
  pen.fillStyle = pen.strokeStyle = color;
  if (solid) pen.fillRect(left, y, wide > 4 ? wide - 1 : wide, height);
  else {
    pen.globalAlpha = alpha * 0.3;
    pen.fillRect(left, y, wide > 4 ? wide - 1 : wide, height);
    pen.globalAlpha = alpha;
    pen.lineWidth = 1;
    if (wide > 4) pen.strokeRect(left + 0.5, y + 0.5, wide - 2, height - 1);
  }
  pen.globalAlpha = 1;
  drawn++;
  const text = String(row[MICROBATCH]);
  if (row[MICROBATCH] >= 0 && COMPUTES.includes(kind) && height >= 9 && wide > 7 * text.length + 6) {
    const isLight = kind === "W" || kind === "I";
    pen.fillStyle = !solid || alpha < 0.8 ? colors.ink : isLight ? "#1d2129" : "#fff";
    pen.textAlign = "center";
    pen.fillText(text, left + wide / 2, y + height / 2 + 0.5);
  }
}

function drawRow(pen, index, width) {
  const rank = data.ranks[index], y = topOf(index), height = rowHeight - 5, stagesHere = stagesOf[index];
  pen.fillStyle = colors.idle;
  pen.fillRect(LEFT, y, width - LEFT, height);
  for (const [phase, , start, end] of rank.phases) {
    if (end < view[0] || start > view[1]) continue;
    const left = Math.max(LEFT, xOf(start, width)), right = Math.min(width, xOf(end, width));
    pen.globalAlpha = 0.7;
    pen.fillStyle = colors[data.phases[phase]];
    pen.fillRect(left, y, Math.max(right - left, 0.6), height);
    pen.globalAlpha = 1;
  }
  for (const [, start, end] of rank.waits) {
    const left = Math.max(LEFT, xOf(start, width)), right = Math.min(width, xOf(end, width));
    if (right - left > 1) hatch(pen, left, y, right - left, height);
  }
  let lastPixel = -1;
  for (let at = firstVisible(rank.actions, view[0], END); at < rank.actions.length; at++) {
    const row = rank.actions[at], kind = data.kinds[row[KIND]];
    if (row[READY] > view[1]) break;
    const pixel = Math.floor(2 * xOf(row[END], width));
    if (pixel === lastPixel) continue; // nothing of it would be seen
    lastPixel = pixel;
    const left = Math.max(LEFT, xOf(row[READY], width)), right = Math.min(width, xOf(row[START], width));
    if (right - left > 1) hatch(pen, left, y, right - left, height);
    if (COMPUTES.includes(kind)) box(pen, row, kind, [row[START], row[END]], y, height, width, stagesHere, true);
    else box(pen, row, kind, [row[START], row[END]], y + height - 5, 5, width, stagesHere, true);
  }
  const predicted = data.predicted[index];
  if (showsPredicted && predicted !== null) {
    const small = Math.max(6, Math.round(0.6 * height));
    for (const row of predicted) {
      box(pen, row, data.kinds[row[0]], [row[3], row[4]], y + height + 2, small, width, stagesHere, false);
    }
  }
  pen.fillStyle = colors.ink;
  pen.textAlign = "right";
  if (rowHeight >= 12) pen.fillText("rank " + rank.rank, LEFT - 10, y + height / 2 + 0.5);
  if (selected !== null && selected[0] === index) {
    const row = rank.actions[selected[1]];
    const left = Math.max(LEFT, xOf(row[START], width)), right = Math.min(width, xOf(row[END], width));
    if (right >= LEFT && left <= width) {
      pen.strokeStyle = colors.ink;
      pen.lineWidth = 2;
      pen.strokeRect(left, y, Math.max(right - left, 3), height);
    }
  }
}

function drawGantt() {
  const height = topOf(numRanks - 1) + heightOf() + 4, [pen, width] = prepare(gantt, height);
  drawn = 0;
  drawAxis(pen, width, height);
  for (let index = 0; index < numRanks; index++) drawRow(pen, index, width);
  pen.strokeStyle = colors.soft;
  pen.setLineDash([3, 3]);
  for (const [, start] of data.steps) {
    const x = Math.round(xOf(start, width)) + 0.5;
    if (x < LEFT || x > width) continue;
    pen.beginPath();
    pen.moveTo(x, TOP - 5);
    pen.lineTo(x, height);
    pen.stroke();
  }
  pen.setLineDash([]);
}
