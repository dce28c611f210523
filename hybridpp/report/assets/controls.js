// What moves the view and explains what is under the pointer.
function redraw() {
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(() => {
    drawGantt();
    drawMemory();
  });
}

function show(start, end) {
  const shortest = 1; // microsecond
  const span = Math.max(shortest, Math.min(end - start, 1.1 * (all[1] - all[0])));
  const middle = (start + end) / 2;
  view = [middle - span / 2, middle + span / 2];
  redraw();
}
const fitStep = () => show(chosen[1] - 0.01 * (chosen[2] - chosen[1]), chosen[2] + 0.01 * (chosen[2] - chosen[1]));
const fitAll = () => show(all[0], all[1]);
function zoom(factor, at) {
  const center = at === undefined ? (view[0] + view[1]) / 2 : at;
  show(center - (center - view[0]) * factor, center + (view[1] - center) * factor);
}
const pan = (share) => show(view[0] + share * (view[1] - view[0]), view[1] + share * (view[1] - view[0]));

function describe(index, row) {
  const rank = data.ranks[index], kind = data.kinds[row[KIND]], [dp, pp, tp] = rank.place;
  const parts = [
    `rank ${rank.rank} (replica ${dp}, position ${pp}, shard ${tp})`,
    `${WORDS[kind] || kind.toLowerCase().replace("_", " ")} of stage ${row[STAGE]}` +
      (row[MICROBATCH] >= 0 ? `, micro-batch ${row[MICROBATCH]}` : ""),
    milliseconds(row[END] - row[START]),
    `from ${milliseconds(row[START] - chosen[1])}`,
  ];
  if (row[START] - row[READY] > 0.5) parts.push(`after a wait of ${milliseconds(row[START] - row[READY])}`);
  if (row[WAITED] > 0) parts.push(`of it ${milliseconds(row[WAITED])} waiting in collectives`);
  if (row[PEER] !== null) parts.push(`${bytes(row[BYTES])} with rank ${row[PEER]}`);
  if (row[COLLECTIVE]) parts.push(`${bytes(row[COLLECTIVE])} to collectives`);
  if (row[MEMORY] !== null) parts.push(`${bytes(row[MEMORY])} in use after it`);
  return parts.join(" · ");
}

function find(x, y) {
  const width = gantt.clientWidth, time = timeOf(x, width);
  const index = data.ranks.findIndex((_, at) => y >= topOf(at) && y < topOf(at) + heightOf());
  if (index < 0 || x < LEFT) return null;
  const rows = data.ranks[index].actions, slack = (2 * (view[1] - view[0])) / (width - LEFT);
  const at = firstVisible(rows, time - slack, END);
  if (at < rows.length && rows[at][START] <= time + slack) return [index, at];
  return [index, -1, time];
}

function explain(found) {
  if (found === null) return;
  const [index, at, time] = found, rank = data.ranks[index];
  if (at >= 0) {
    readout.textContent = describe(index, rank.actions[at]);
    return;
  }
  const next = rank.actions.find((row) => row[READY] <= time && time < row[START]);
  const phase = rank.phases.find(([, , start, end]) => start <= time && time <= end);
  const wait = rank.waits.find(([, start, end]) => start <= time && time <= end);
  let what = "nothing that is recorded";
  if (phase) what = `${WORDS[data.phases[phase[0]]]}, ${milliseconds(phase[3] - phase[2])}`;
  if (next) what = `waits for a message, ${milliseconds(next[START] - next[READY])}`;
  if (wait) what += `; waits for other ranks (group ${data.groups[wait[0]]}), ${milliseconds(wait[2] - wait[1])}`;
  readout.textContent = `rank ${rank.rank} · ${what}`;
}

function select(rank, at) {
  const index = Math.max(0, Math.min(numRanks - 1, rank)), rows = data.ranks[index].actions;
  if (!rows.length) return;
  selected = [index, Math.max(0, Math.min(rows.length - 1, at))];
  const row = rows[selected[1]];
  readout.textContent = describe(index, row);
  if (row[START] < view[0] || row[END] > view[1]) pan((row[START] - view[0]) / (view[1] - view[0]) - 0.2);
  redraw();
}

function chooseStep(number) {
  chosen = data.steps.find((step) => step[0] === number);
  document.getElementById("step").value = String(number);
  fitStep();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const [index, at] = selected === null ? [0, -1] : selected;
  const actions = {
    ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), "+": () => zoom(0.7), "=": () => zoom(0.7),
    "-": () => zoom(1 / 0.7), 0: fitStep, a: fitAll, n: () => select(index, at + 1), p: () => select(index, at - 1),
    ArrowUp: () => select(index - 1, Math.max(0, at)), ArrowDown: () => select(index + (at < 0 ? 0 : 1), Math.max(0, at)),
  };
  if (actions[event.key]) {
    event.preventDefault();
    actions[event.key]();
  }
}

function listen() {
  let dragged = null;
  gantt.addEventListener("pointerdown", (event) => {
    dragged = event.clientX;
    gantt.setPointerCapture(event.pointerId);
    gantt.classList.add("dragging");
  });
  for (const end of ["pointerup", "pointercancel"]) {
    gantt.addEventListener(end, () => {
      dragged = null;
      gantt.classList.remove("dragging");
    });
  }
  gantt.addEventListener("pointermove", (event) => {
    const place = gantt.getBoundingClientRect();
    if (dragged !== null) {
      pan((dragged - event.clientX) / (gantt.clientWidth - LEFT));
      dragged = event.clientX;
    } else {
      explain(find(event.clientX - place.left, event.clientY - place.top));
    }
  });
  gantt.addEventListener("click", (event) => {
    const place = gantt.getBoundingClientRect(), found = find(event.clientX - place.left, event.clientY - place.top);
    if (found !== null && found[1] >= 0) select(found[0], found[1]);
  });
  gantt.addEventListener("dblclick", fitStep);
  for (const canvas of [gantt, memory]) {
    canvas.addEventListener("wheel", (event) => {
      const place = canvas.getBoundingClientRect();
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        zoom(Math.exp(0.002 * event.deltaY), timeOf(event.clientX - place.left, canvas.clientWidth));
      } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        pan(event.deltaX / (canvas.clientWidth - LEFT));
      }
    }, { passive: false });
  }
  gantt.addEventListener("keydown", onKey);
  const press = { "zoom-in": () => zoom(0.7), "zoom-out": () => zoom(1 / 0.7), "fit-step": fitStep, "fit-all": fitAll };
  for (const [id, action] of Object.entries(press)) document.getElementById(id).addEventListener("click", action);
  document.getElementById("step").addEventListener("change", (event) => chooseStep(Number(event.target.value)));
  document.getElementById("predicted").addEventListener("change", (event) => {
    showsPredicted = event.target.checked;
    redraw();
  });
  window.addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readColors();
    makeLegends();
    redraw();
  });
}
