// The memory timeline of report.html: decodes what timeline_data.py wrote, draws it with plotly.js, answers keys and pointer.
// Every name comes out of records: it is escaped before plotly.js, whose texts know a few tags, and set as text everywhere else.
(() => {
"use strict";
const byId = id => document.getElementById(id);
const DATA = JSON.parse(byId("timeline-data").textContent);
const KIND = Object.fromEntries(DATA.keys.kinds.map((name, code) => [name, code]));
const plot = byId("timeline-plot");
const NANO = 1e9, MIB = 2 ** 20, COLUMNS = 500;  // columns: instants are thinned to about two of them a pixel
const state = {cells: [0, -1], stack: "roles", along: "time", range: null, cursor: 0};

// --- decoding ------------------------------------------------------------------------------------------------------------
const sums = steps => { let total = 0; return Float64Array.from(steps, step => total += step); };

function levels(series, count) {
  const found = new Float64Array(count), at = sums(series.at), to = sums(series.by);
  for (let k = 0; k < at.length; k++) found.fill(to[k], at[k], k + 1 < at.length ? at[k + 1] : count);
  return found;
}

const decoded = new Map();
function cellOf(index) {
  if (!decoded.has(index)) decoded.set(index, decode(DATA.cells[index]));
  return decoded.get(index);
}

function decode(body) {
  const tape = DATA.tapes[body.tape], time = sums(body.at).map(t => t / NANO), count = time.length;
  const inside = levels(body.inside, count);
  const stacks = {roles: body.roles, layers: body.layers};
  for (const key in stacks) stacks[key] = [...stacks[key].map(series => levels(series, count)), inside];
  const total = new Float64Array(count);
  for (const band of stacks.roles) for (let i = 0; i < count; i++) total[i] += band[i];
  const isRun = kind => kind === KIND.compute || kind === KIND.recompute;
  const before = [];  // runs before each instruction
  let runs = 0;
  for (const kind of body.kinds) { before.push(runs); runs += isRun(kind); }
  const cell = {body, tape, time, stacks, total, runs, before, count, runsAt: sums(body.runs), instruction: sums(body.instruction)};
  cell.highest = total.reduce((best, bytes, i) => bytes > total[best] ? i : best, 0);
  cell.lanes = {};
  for (const name in body.lanes) {
    const {instruction, start, length} = body.lanes[name], from = sums(start);
    cell.lanes[name] = {instruction: sums(instruction), start: from.map(t => t / NANO),
                        end: from.map((t, i) => (t + length[i]) / NANO)};
  }
  const [first, again] = [cell.lanes.compute, cell.lanes.recompute], order = [];
  for (const lane of [first, again]) lane.instruction.forEach((k, i) => { order[before[k]] = [lane.start[i], lane.end[i]]; });
  cell.runTimes = order;
  return cell;
}

// --- places on the x axis ------------------------------------------------------------------------------------------------
function lastAtOrBelow(sorted, value) {  // index, -1 when all are above
  let low = 0, high = sorted.length;
  while (low < high) { const middle = (low + high) >> 1; if (sorted[middle] <= value) low = middle + 1; else high = middle; }
  return low - 1;
}

function placeOfTime(cell, seconds) {  // in runs of ops: a fraction inside a run
  if (state.along === "time") return seconds;
  cell.runStarts ??= cell.runTimes.map(run => run[0]);
  const run = lastAtOrBelow(cell.runStarts, seconds);
  if (run < 0) return 0;
  const [start, end] = cell.runTimes[run];
  return run + (end > start ? Math.min(1, (seconds - start) / (end - start)) : 1);
}

const places = cell => state.along === "time" ? cell.time : cell.runsAt;
const extent = cell => state.along === "time" ? cell.body.step / NANO : cell.runs;

function eventPlace(cell, name, lane, i) {
  if (state.along === "runs" && (name === "compute" || name === "recompute")) {
    const run = cell.before[lane.instruction[i]];
    return [run, run + 1];
  }
  return [placeOfTime(cell, lane.start[i]), placeOfTime(cell, lane.end[i])];
}

// --- words ---------------------------------------------------------------------------------------------------------------
const plain = text => text.replace(/[&<>]/g, c => ({"&": "&amp;", "<": "&lt;", ">": "&gt;"})[c]);
const digits = value => value >= 1000 ? value.toFixed(0) : value.toPrecision(4);
function size(bytes) {
  const unit = [["GiB", 2 ** 30], ["MiB", MIB], ["KiB", 1024]].find(([, n]) => bytes >= n);
  return unit ? `${digits(bytes / unit[1])} ${unit[0]}` : `${bytes} B`;
}
const span = seconds => seconds >= 1 ? `${digits(seconds)} s` : `${digits(seconds * 1e3)} ms`;
const opName = (tape, op) => {
  const module = tape.modules[tape.op_module[op]];
  return `#${op} ${tape.targets[tape.op_target[op]]}${module ? ` (${module})` : ""}`;
};
const storageName = (tape, s) => {
  const made = tape.storage_op[s], name = tape.storage_name[s] || `%${s}`;
  return `${name}${made >= 0 && !tape.storage_name[s] ? ` of ${opName(tape, made)}` : ""}, ${size(tape.storage_bytes[s])}`;
};

function instructionWords(cell, index) {
  const {body, tape} = cell, kind = body.kinds[index], operand = body.operands[index];
  if (index < 0) return "start of the step";
  if (kind === KIND.compute || kind === KIND.recompute) {
    return `${DATA.keys.kinds[kind]} ${opName(tape, operand)}, ${DATA.keys.phases[tape.op_phase[operand]]}`;
  }
  const verb = {[KIND.free]: "free", [KIND.offload]: "copy out", [KIND.prefetch]: "copy in", [KIND.wait]: "stands still for"}[kind];
  return `${verb} ${storageName(tape, operand)}`;
}

const groupNames = cell => [...(state.stack === "roles" ? DATA.keys.roles : cell.tape.layers), DATA.keys.inside];

function readout(cell, i, seconds = cell.time[i]) {  // at that instant, or later while nothing else has changed
  const bands = cell.stacks[state.stack], held = groupNames(cell).map((name, g) => [name, bands[g][i]]).filter(([, n]) => n > 0);
  const running = Object.entries(cell.lanes).filter(([name]) => name.startsWith("copy")).flatMap(([name, lane]) => {
    const k = lastAtOrBelow(lane.start, seconds);
    return k >= 0 && lane.end[k] > seconds ? [`${name}: ${storageName(cell.tape, cell.body.operands[lane.instruction[k]])}`] : [];
  });
  const since = seconds > cell.time[i] ? ` (since ${span(cell.time[i])})` : "";
  return `${cell.body.name}, at ${span(seconds)}: ${instructionWords(cell, cell.instruction[i])}${since}. Live ${size(cell.total[i])}: ` +
    `${held.map(([name, n]) => `${name} ${size(n)}`).join(", ")}.${running.length ? ` Meanwhile ${running.join("; ")}.` : ""}`;
}

// --- what of a step is drawn in a range: of each column of pixels the first, highest, lowest and last instant ---------------------------
function instantsIn(cell, low, high) {
  const x = places(cell), from = Math.max(0, lastAtOrBelow(x, low - 1e-12)), to = Math.min(cell.count - 1, lastAtOrBelow(x, high) + 1);
  if (to - from <= 4 * COLUMNS) return Array.from({length: to - from + 1}, (_, k) => from + k);
  const found = [], width = (high - low) / COLUMNS, top = cell.total;
  for (let i = from; i <= to;) {
    const column = Math.floor((x[i] - low) / width);
    let least = i, most = i, last = i;
    for (let k = i; k <= to && Math.floor((x[k] - low) / width) === column; k++) {
      if (top[k] < top[least]) least = k;
      if (top[k] > top[most]) most = k;
      last = k;
    }
    found.push(...new Set([i, Math.min(least, most), Math.max(least, most), last]));
    i = last + 1;
  }
  return found;
}

function segmentsIn(cell, name, low, high) {  // [start, end, words]; neighbours closer than a pixel are one
  const lane = cell.lanes[name], found = [], pixel = (high - low) / (2 * COLUMNS);
  const merge = lane.start.length > 2 * COLUMNS;
  for (let i = 0; i < lane.start.length; i++) {
    const [start, end] = eventPlace(cell, name, lane, i);
    if (end < low || start > high || (name === "wait" && end === start)) continue;
    const last = found[found.length - 1];
    if (merge && last && start - last[1] < pixel && end - last[0] < 3 * pixel) {
      last[1] = Math.max(last[1], end);
      last[3] += 1;
    } else {
      found.push([start, end, i, 1]);
    }
  }
  const more = count => count > 1 ? ` and ${count - 1} more: zoom in` : "";
  return found.map(([start, end, i, count]) => [start, end, eventWords(cell, lane, i) + more(count)]);
}

const eventWords = (cell, lane, i) =>
  `${instructionWords(cell, lane.instruction[i])}: ${span(lane.end[i] - lane.start[i])} from ${span(lane.start[i])}`;

// --- drawing -------------------------------------------------------------------------------------------------------------
const SHADES = [0.06, 0.16, 0.34];  // forward, backward, optimizer
const LANES = {compute: [2, "--muted", 0.35], recompute: [2, "--series-2", 0.35], wait: [2, "--ink", 0.08],  // row, colour, half height
               "copy out": [1, "--series-1", 0.35], "copy in": [0, "--series-3", 0.35]};
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const OWN = {[DATA.keys.inside]: "--ink", [DATA.keys.others]: "--muted"};
const colourOf = (names, g) => css(OWN[names[g]] || `--series-${g % 8 + 1}`);
const fillOf = (names, g) => names[g] === DATA.keys.inside
  ? {fillpattern: {shape: "/", size: 5, solidity: 0.35, fgcolor: css("--ink"), bgcolor: css("--paper"), fillmode: "replace"}}
  : {fillcolor: colourOf(names, g)};

function tracesOf(cell, side, low, high, unit) {
  const xaxis = side ? "x2" : "x", memory = side ? "y3" : "y", lanes = side ? "y4" : "y2";
  const shown = instantsIn(cell, low, high), x = shown.map(i => places(cell)[i]), names = groupNames(cell);
  const below = new Float64Array(shown.length), traces = [];
  names.forEach((name, g) => {
    const band = cell.stacks[state.stack][g];
    if (!shown.some(i => band[i])) return;
    shown.forEach((i, k) => { below[k] += band[i]; });
    traces.push({type: "scatter", mode: "lines", xaxis, yaxis: memory, x, y: Array.from(below, n => n / unit), hoverinfo: "skip",
                 name: plain(name), fill: traces.length ? "tonexty" : "tozeroy", line: {width: 0, shape: "hv"}, ...fillOf(names, g)});
  });
  traces.push(totalTrace(cell, shown, xaxis, memory, low, high, unit));
  for (const name in LANES) traces.push(laneTrace(cell, name, xaxis, lanes, low, high));
  return traces;
}

function totalTrace(cell, shown, xaxis, yaxis, low, high, unit) {  // with points between far ones, for the pointer to find
  const x = [], at = [], place = places(cell), step = (high - low) / 50;
  shown.forEach((i, k) => {
    const from = Math.max(place[i], low), to = Math.min(k + 1 < shown.length ? place[shown[k + 1]] : place[i], high);
    x.push(place[i]);
    at.push(i);
    for (let between = from + step; between < to; between += step) { x.push(between); at.push(i); }
  });
  return {type: "scatter", mode: "lines", xaxis, yaxis, x, y: at.map(i => cell.total[i] / unit), name: "live bytes", customdata: at,
          line: {width: 0.7, shape: "hv", color: css("--ink")}, hovertemplate: "%{text}<extra></extra>",
          text: at.map(i => plain(`${size(cell.total[i])}, ${instructionWords(cell, cell.instruction[i])}`))};
}

// One outline for all events of a lane, up at the start of each and down at its end: an element for each event would take long to draw.
function laneTrace(cell, name, xaxis, yaxis, low, high) {
  const [row, colour, half] = LANES[name], x = [], y = [], text = [], step = (high - low) / 50, pixel = (high - low) / (2 * COLUMNS);
  const segments = segmentsIn(cell, name, low, high);
  for (const [start, end, words] of segments) {
    const from = Math.max(start, low - step), to = Math.min(Math.max(end, start + pixel), high + step);  // however short, it is seen
    const parts = Math.max(2, Math.ceil((to - from) / step));
    for (let part = -1; part <= parts + 1; part++) {
      x.push(from + (to - from) * Math.min(1, Math.max(0, part / parts)));
      y.push(part < 0 || part > parts ? row - half : row + half);
      text.push(plain(words));
    }
  }
  const edge = segments.every(([start, end]) => end - start > 5 * pixel) ? 0.6 : 0;
  return {type: "scatter", mode: "lines", xaxis, yaxis, x, y, text, name, fill: "toself", fillcolor: css(colour), hoveron: "points",
          hovertemplate: "%{text}<extra></extra>", line: {width: edge, color: css("--paper"), simplify: false}};
}

function shapesOf(cell, side, unit) {
  const xref = side ? "x2" : "x", memory = side ? "y3" : "y", shapes = [], notes = [];
  const ends = cell.body.phases.slice(1).map(phase => placeOfPhase(cell, phase)).concat(extent(cell));
  cell.body.phases.forEach((phase, k) => {
    const [start, end] = [placeOfPhase(cell, phase), ends[k]];
    for (const yref of [`${memory} domain`, `${side ? "y4" : "y2"} domain`]) {
      shapes.push({type: "rect", xref, yref, x0: start, x1: end, y0: 0, y1: 1, layer: "below", line: {width: 0}, fillcolor: css("--muted"),
                   opacity: SHADES[phase[0]]});
    }
    if (k) shapes.push({type: "line", xref, yref: `${memory} domain`, x0: start, x1: start, y0: 0, y1: 1,
                        line: {width: 1, color: css("--muted"), dash: "dot"}});
    if ((end - start) / extent(cell) > 0.12) {
      notes.push({xref, yref: `${memory} domain`, x: (start + end) / 2, y: 1, yanchor: "bottom", showarrow: false,
                  text: DATA.keys.phases[phase[0]], font: {size: 11, color: css("--muted")}});
    }
  });
  const {budget, measured} = cell.body, isBelow = budget !== null && measured !== null && measured <= budget;
  for (const [bytes, words, dash, colour, x, xanchor, isUnder] of [[budget, "budget", "dash", "--bad", 0, "left", false],
                                                                   [measured, "measured peak", "solid", "--link", 1, "right", isBelow]]) {
    if (bytes === null) continue;
    shapes.push({type: "line", xref: `${xref} domain`, yref: memory, x0: 0, x1: 1, y0: bytes / unit, y1: bytes / unit,
                 line: {width: 1.5, dash, color: css(colour)}});
    // Each beside its own line and off the other's, on paper: what is drawn below stays legible.
    notes.push({xref: `${xref} domain`, yref: memory, x, y: bytes / unit, xanchor, yanchor: isUnder ? "top" : "bottom",
                yshift: isUnder ? -3 : 3, xshift: x ? -3 : 3, showarrow: false, bgcolor: css("--paper"), opacity: 0.9, borderpad: 1,
                text: `${words} ${size(bytes)}`, font: {size: 11, color: css(colour)}});
  }
  return [shapes, notes];
}

const placeOfPhase = (cell, phase) => state.along === "time" ? phase[1] / NANO : cell.before[phase[3]] || 0;

function fullRange() {
  return [0, Math.max(...shownCells().map(extent))];
}
const shownCells = () => state.cells.filter(index => index >= 0).map(cellOf);

function draw() {
  const cells = shownCells(), narrow = plot.clientWidth < 760 && cells.length > 1;
  const highest = Math.max(...cells.flatMap(cell => [cell.body.peak, cell.body.budget || 0, cell.body.measured || 0]));
  const [word, unit] = highest >= 4 * 2 ** 30 ? ["GiB", 2 ** 30] : ["MiB", MIB];
  const [low, high] = state.range || fullRange();
  const columns = cells.length > 1 && !narrow ? [[0, 0.487], [0.513, 1]] : [[0, 1], [0, 1]];
  const rows = narrow ? [[[0.66, 0.95], [0.54, 0.63]], [[0.14, 0.41], [0, 0.1]]] : [[[0.24, 0.93], [0, 0.17]], [[0.24, 0.93], [0, 0.17]]];
  const [quiet, rule] = [css("--muted"), css("--rule")];
  const axis = {color: quiet, gridcolor: rule, zerolinecolor: rule, linecolor: quiet, automargin: false};
  const layout = {
    width: plot.clientWidth, height: narrow ? 960 : 520, margin: {l: 76, r: 12, t: 30, b: 48},
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--ink")}, showlegend: false, hovermode: "x",
    modebar: {bgcolor: "rgba(0,0,0,0)", color: quiet, activecolor: css("--ink")},
    hoverdistance: 25, dragmode: matchMedia("(pointer: coarse)").matches ? "pan" : "zoom", shapes: [], annotations: [],
    hoverlabel: {bgcolor: css("--shade"), bordercolor: css("--rule"), font: {color: css("--ink"), size: 11}, namelength: 0, align: "left"},
  };
  const data = cells.flatMap((cell, side) => {
    const [x, memory, lanes] = side ? ["xaxis2", "yaxis3", "yaxis4"] : ["xaxis", "yaxis", "yaxis2"];
    const isShared = side && !narrow;
    layout[x] = {...axis, domain: columns[side], anchor: side ? "y4" : "y2", range: [low, high], hoverformat: " ", showgrid: false,
                 zeroline: false, title: {text: state.along === "time" ? "seconds of the step, simulated" : "runs of ops", standoff: 8},
                 ...(side ? {matches: "x"} : {})};
    layout[memory] = {...axis, domain: rows[side][0], anchor: side ? "x2" : "x", range: [0, 1.1 * highest / unit], rangemode: "tozero",
                      showticklabels: !isShared, title: {text: isShared ? "" : `live bytes (${word})`}, ...(side ? {matches: "y"} : {})};
    layout[lanes] = {...axis, domain: rows[side][1], anchor: side ? "x2" : "x", range: [-0.7, 2.7], tickvals: [0, 1, 2], fixedrange: true,
                     ticktext: ["copy in", "copy out", "compute"], showgrid: false, zeroline: false, showticklabels: !isShared};
    const [shapes, notes] = shapesOf(cell, side, unit);
    layout.shapes.push(...shapes);
    layout.annotations.push(...notes, {xref: `${side ? "x2" : "x"} domain`, yref: "paper", x: 0, xanchor: "left", yanchor: "bottom",
      y: rows[side][0][1] + 0.035, showarrow: false, text: `<b>${plain(cell.body.name)}</b>: peak ${size(cell.body.peak)}, simulated`});
    return tracesOf(cell, side, low, high, unit);
  });
  const config = {displaylogo: false, responsive: false, doubleClick: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d",
    "resetScale2d"], toImageButtonOptions: {format: "svg", filename: "memory-timeline"}};
  Plotly.react(plot, data, layout, config);
  // A screen reader gets what is shown in words, the readout and the tables: not the drawing's loose words and ticks.
  for (const svg of document.querySelectorAll("#timeline-plot svg, #js-plotly-tester")) svg.setAttribute("aria-hidden", "true");
  const shown = cells.map(({body}) => `${body.name}, peak ${size(body.peak)}`);
  plot.setAttribute("aria-label", `Memory timeline, simulated: ${shown.join("; ")}`);
  legend(cells[0]);
}

function legend(cell) {
  const names = groupNames(cell), occurs = g => shownCells().some(shown => shown.stacks[state.stack][g]?.some(bytes => bytes));
  entries("timeline-stack-legend", names.map((name, g) => [name, colourOf(names, g), name === DATA.keys.inside ? "hatched" : ""])
    .filter((entry, g) => occurs(g)));
  entries("timeline-lane-legend", [
    ...["compute", "recompute"].map(name => [name, css(LANES[name][1]), ""]), ["stands still", css(LANES.wait[1]), "thin"],
    ...DATA.keys.phases.map((name, k) => [`${name} (shade)`, css("--muted"), "", SHADES[k]])]);
  const thinned = shownCells().reduce((n, shown) => n + shown.body.thinned, 0);
  byId("timeline-thinned").textContent = thinned
    ? `Of a step of more than 5,000 runs only local maxima and minima are kept: ${thinned} instants between them are not.` : "";
}

const MARKS = {"": ["rect", {width: 11, height: 8}], thin: ["rect", {y: 3, width: 11, height: 2}],
               hatched: ["path", {d: "M0 4 4 0M2 8 10 0M8 8 11 5"}]};
function entries(id, found) {
  byId(id).replaceChildren(...found.map(([name, colour, mark, opacity = 1]) => {
    const [svg, shape] = ["svg", MARKS[mark][0]].map(tag => document.createElementNS("http://www.w3.org/2000/svg", tag));
    svg.setAttribute("viewBox", "0 0 11 8");
    svg.setAttribute("aria-hidden", "true");
    const paint = mark === "hatched" ? {stroke: colour, fill: "none"} : {fill: colour, "fill-opacity": opacity, stroke: "none"};
    for (const [key, value] of Object.entries({...MARKS[mark][1], ...paint})) shape.setAttribute(key, value);
    svg.append(shape);
    const item = document.createElement("li");
    item.append(svg, name);
    return item;
  }));
}

// --- what the reader does ------------------------------------------------------------------------------------------------
function tell(side, i) {  // what happens at an instant of one step, and at the same place of the other
  const own = cellOf(state.cells[side]), place = places(own)[i];
  ["left", "right"].forEach((name, other) => {
    const cell = state.cells[other] >= 0 ? cellOf(state.cells[other]) : null;
    const at = other === side || !cell ? i : Math.max(0, lastAtOrBelow(places(cell), place));
    const seconds = cell && state.along === "time" ? Math.min(own.time[i], cell.body.step / NANO) : undefined;
    byId(`timeline-readout-${name}`).textContent = cell ? readout(cell, at, seconds) : "";
  });
}

function point(i) {  // the cursor of the keyboard: an instant of the left step
  const cell = cellOf(state.cells[0]), curve = plot.data.findIndex(trace => trace.customdata);
  state.cursor = Math.min(cell.count - 1, Math.max(0, i));
  const x = places(cell)[state.cursor], [low, high] = state.range || fullRange();
  if (x < low || x > high) { state.range = [x - (high - low) / 2, x + (high - low) / 2]; draw(); }
  const shown = plot.data[curve].customdata.indexOf(state.cursor);  // not every instant has a point of its own before zooming in
  Plotly.Fx.hover(plot, shown >= 0 ? [{curveNumber: curve, pointNumber: shown}] : {xval: x}, ["xy"]);
  tell(0, state.cursor);
}

function zoom(factor) {
  const [low, high] = state.range || fullRange(), x = places(cellOf(state.cells[0]))[state.cursor];
  state.range = [x - (x - low) * factor, x + (high - x) * factor];
  draw();
}
const whole = () => { state.range = null; draw(); };

const KEYS = {
  ArrowLeft: () => point(state.cursor - 1), ArrowRight: () => point(state.cursor + 1), Home: () => point(0), End: () => point(Infinity),
  p: () => point(cellOf(state.cells[0]).highest), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: whole,
};
plot.addEventListener("keydown", event => {
  if (!(event.key in KEYS) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  KEYS[event.key]();
});

function listen() {
  plot.on("plotly_relayout", change => {
    if (!Object.keys(change).some(key => key.startsWith("xaxis"))) return;
    const [low, high] = plot.layout.xaxis.range.map(Number);
    state.range = high > low ? [low, high] : null;
    draw();
  });
  plot.on("plotly_doubleclick", whole);
  plot.on("plotly_hover", ({points}) => {
    const hit = points.find(p => typeof p.customdata === "number");
    if (hit) tell(hit.data.xaxis === "x2" ? 1 : 0, hit.customdata);
  });
  ["left", "right"].forEach((name, side) => byId(`timeline-${name}`).addEventListener("change", event => {
    state.cells[side] = Number(event.target.value);
    state.range = null;
    state.cursor = 0;
    draw();
  }));
  for (const [key, name] of [["stack", "timeline-stack"], ["along", "timeline-along"]]) {
    for (const input of document.getElementsByName(name)) {
      input.addEventListener("change", () => { state[key] = input.value; if (key === "along") state.range = null; draw(); });
    }
  }
  byId("timeline-reset").addEventListener("click", whole);
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", draw);
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(draw, 150); });
}

// Two methods of one group where there are two: the first beside the one at the smallest budget.
const rival = DATA.cells.findIndex((cell, i) => i > 0 && cell.where === DATA.cells[0].where);
state.cells = [0, rival];
byId("timeline-left").value = "0";
byId("timeline-right").value = String(rival);
byId("timeline-view").hidden = false;
draw();
listen();
tell(0, cellOf(0).highest);
})();
