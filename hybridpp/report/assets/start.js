// Legends, menus, and the first picture.
function key(color, words, isHatched, opacity = 1) {
  const item = document.createElement("span"), mark = document.createElement("i");
  item.className = "key";
  mark.style.opacity = opacity;
  mark.style.background = isHatched
    ? `repeating-linear-gradient(135deg, ${color} 0 1px, transparent 1px 4px)` : color;
  item.append(mark, words);
  return item;
}

function makeLegends() {
  const legend = document.getElementById("legend"), present = COMPUTES.filter((kind) => data.kinds.includes(kind));
  const phases = data.phases.filter((_, number) => data.ranks.some((rank) => rank.phases.some((row) => row[0] === number)));
  legend.replaceChildren(...present.map((kind) => key(colors[kind], WORDS[kind])));
  if (data.kinds.some((kind) => !COMPUTES.includes(kind))) legend.append(key(colors.communication, "starts messages or sums"));
  if (data.ranks.some((rank) => rank.waits.length || rank.actions.some((row) => row[START] - row[READY] > 0))) {
    legend.append(key(colors.messages, "waits for other ranks", true));
  }
  legend.append(...phases.map((phase) => key(colors[phase], WORDS[phase], false, 0.7)), key(colors.idle, "idle"));
  if (stagesOf.some((stages) => stages.length > 1)) legend.append("A rank's later stages are fainter.");
  const lines = document.getElementById("memory-legend");
  if (!hasMemory) return;
  lines.replaceChildren();
  if (numRanks <= 16) lines.append(...data.ranks.map((rank, index) => key(lineColor(index), `rank ${rank.rank}`)));
  else lines.append("A colour is a position in the pipeline.");
  if (data.ranks.some((rank) => rank.place[2] % 2)) lines.append("Dashed: odd numbers among the ranks that share layers.");
}

const menu = document.getElementById("step");
for (const [number, start, end] of data.steps) menu.add(new Option(`${number}: ${milliseconds(end - start)}`, String(number)));
if (!hasPrediction) document.getElementById("predicted-label").hidden = true;
if (!hasMemory) document.getElementById("memory-box").hidden = true;
readColors();
makeLegends();
listen();
chooseStep(data.chosen);
// For tests: what is shown, and where it is.
window.report = {
  view: () => [...view],
  drawn: () => drawn,
  center: (index, at) => {
    const row = data.ranks[index].actions[at];
    return [xOf((row[START] + row[END]) / 2, gantt.clientWidth), topOf(index) + (rowHeight - 5) / 2];
  },
};
