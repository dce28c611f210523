// What is drawn, where it is on the screen, and how numbers are written.
const data = JSON.parse(document.getElementById("data").textContent);
const KIND = 0, STAGE = 1, MICROBATCH = 2, STEP = 3, READY = 4, START = 5, END = 6, MEMORY = 7, PEER = 8, BYTES = 9,
  COLLECTIVE = 10, WAITED = 11;
const WORDS = {
  F: "forward", B: "backward", I: "gradient of inputs", W: "gradient of weights", read: "reads the batch",
  end: "end of the step", update: "updates weights",
};
const COMPUTES = ["F", "B", "I", "W"];
const LEFT = 92, TOP = 26;
const numRanks = data.ranks.length;
const rowHeight = numRanks <= 8 ? 34 : numRanks <= 16 ? 26 : numRanks <= 40 ? 18 : 12;
const gantt = document.getElementById("gantt"), memory = document.getElementById("memory");
const readout = document.getElementById("readout");
const hasMemory = data.memory !== null;
const hasPrediction = data.predicted.some((rows) => rows !== null);
const lastStep = data.steps[data.steps.length - 1];
const all = [0, Math.max(lastStep[2], 1)];
let chosen = data.steps.find((step) => step[0] === data.chosen);
let view = [0, 1], showsPredicted = false, selected = null, colors = {}, frame = 0;

function readColors() {
  const style = getComputedStyle(document.documentElement);
  const names = ["F", "B", "I", "W", "messages", "collectives", "communication", "read", "end", "update", "ink", "soft",
    "line", "idle", "card", "accent"];
  colors = Object.fromEntries(names.map((name) => [name, style.getPropertyValue("--" + name).trim()]));
}

function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = height + "px";
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px " + getComputedStyle(document.body).fontFamily;
  pen.textBaseline = "middle";
  return [pen, width];
}

const xOf = (time, width) => LEFT + ((time - view[0]) / (view[1] - view[0])) * (width - LEFT);
const timeOf = (x, width) => view[0] + ((x - LEFT) / (width - LEFT)) * (view[1] - view[0]);
const milliseconds = (us) => (us / 1000).toLocaleString("en", { maximumFractionDigits: us < 1000 ? 3 : 2 }) + " ms";
function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (power + 1 < units.length && Math.abs(number) >= 1024 ** (power + 1)) power++;
  return (number / 1024 ** power).toLocaleString("en", { maximumFractionDigits: power ? 2 : 0 }) + " " + units[power];
}

function tickStep(span, count) {
  const rough = span / count, base = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * base).find((step) => step >= rough);
}

function drawAxis(pen, width, height) {
  const step = tickStep(view[1] - view[0], Math.max(2, (width - LEFT) / 110));
  pen.strokeStyle = colors.line;
  pen.fillStyle = colors.soft;
  pen.lineWidth = 1;
  pen.textAlign = "center";
  // Times are those since the start of the chosen step.
  const first = Math.ceil((view[0] - chosen[1]) / step) * step;
  for (let tick = first; tick + chosen[1] <= view[1]; tick += step) {
    const x = Math.round(xOf(tick + chosen[1], width)) + 0.5;
    pen.beginPath();
    pen.moveTo(x, TOP - 5);
    pen.lineTo(x, height);
    pen.stroke();
    if (x > LEFT + 4 && x < width - 22) pen.fillText(milliseconds(tick).replace("-0 ", "0 "), x, TOP - 14);
  }
}
