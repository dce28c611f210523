// Memory over time.
const readings = data.ranks.map((rank) => rank.actions.filter((row) => row[MEMORY] !== null));
const least = readings.map((rows) => rows.reduce((low, row) => Math.min(low, row[MEMORY]), Infinity));
const lineColor = (index) => {
  const position = data.ranks[index].place[1], count = 1 + Math.max(...data.ranks.map((rank) => rank.place[1]));
  return `hsl(${Math.round(210 + (300 * position) / count) % 360} 62% 52%)`;
};

function drawMemory() {
  if (!hasMemory) return;
  const height = 210, [pen, width] = prepare(memory, height), bottom = height - 8;
  let most = 0;
  readings.forEach((rows, index) => {
    for (const row of rows) {
      if (row[END] >= view[0] && row[END] <= view[1]) most = Math.max(most, row[MEMORY] - least[index]);
    }
  });
  most = Math.max(most, 1) * 1.06;
  drawAxis(pen, width, bottom);
  const unit = 1024 ** Math.floor(Math.log(most) / Math.log(1024)), step = tickStep(most / unit, 4) * unit;
  const yOf = (value) => bottom - (value / most) * (bottom - TOP);
  for (let value = 0; value <= most; value += step) {
    const y = Math.round(yOf(value)) + 0.5;
    pen.strokeStyle = colors.line;
    pen.beginPath();
    pen.moveTo(LEFT, y);
    pen.lineTo(width, y);
    pen.stroke();
    pen.fillStyle = colors.soft;
    pen.textAlign = "right";
    pen.fillText(bytes(value), LEFT - 10, y);
  }
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, 0, width - LEFT, height);
  pen.clip();
  readings.forEach((rows, index) => {
    if (!rows.length) return;
    pen.strokeStyle = lineColor(index);
    pen.lineWidth = numRanks <= 16 ? 1.8 : 1;
    pen.setLineDash(data.ranks[index].place[2] % 2 ? [6, 3] : []);
    pen.beginPath();
    const from = Math.max(0, firstVisible(rows, view[0], END) - 1);
    let before = yOf(rows[from][MEMORY] - least[index]);
    pen.moveTo(xOf(rows[from][END], width), before);
    for (let at = from + 1; at < rows.length; at++) {
      const x = xOf(rows[at][END], width), y = yOf(rows[at][MEMORY] - least[index]);
      pen.lineTo(x, before);
      pen.lineTo(x, y);
      before = y;
      if (rows[at][END] > view[1]) break;
    }
    pen.stroke();
  });
  pen.restore();
}
