// Heat maps of layers and steps: pixels on a canvas, axes as SVG over it.

const GROUPS = { weight: "weights", gradient: "gradients" };
const MEANINGS = {
  "zeros": "share of nonzero elements that become 0",
  "zeros_overall": "share of zeros after quantizing",
  "underflow": "share of elements below half the smallest code",
  "clipped": "share of elements beyond the largest code",
  "saturated": "share of codes that are the largest",
  "sqnr_db": "signal-to-quantization-noise ratio in dB",
  "gain": "\u27e8q, x\u27e9 / \u27e8x, x\u27e9, 1 is unbiased",
  "outside_carrier": "share of elements outside the FP8 carrier's window",
  "r": "r(W), the weight's relative change in a step",
  "r_quantized": "r(W_Q), the quantized weight's relative change in a step",
  "confidence": "mean QuantConf, the distance from a rounding threshold",
  "oscillation": "mean R_w, the way of the quantized weight over that of the weight",
  "oscillating": "share of elements whose R_w is over 16",
  "gradient norm": "L2 norm of dW",
  "gradient zeros": "share of zeros in dW",
  "gradient underflow": "share of dY, where wgrad quantizes it, below half the smallest code",
};

// The entry of a table, or null; names come from files.
function entry(table, name) {
  return Object.hasOwn(table, name) ? table[name] : null;
}

function groupWords(group) {
  return entry(GROUPS, group) ?? group;
}

function metricWords(group, metric) {
  const meaning = entry(MEANINGS, `${group} ${metric}`) ?? entry(MEANINGS, metric);
  return meaning ? `${metric} \u2013 ${meaning}` : metric;
}

// The maps of one metric, one of each run (null where it has none), with what they share: rows (the
// indices of layers), the extent of steps, and the scale of colours.
function mapsOf(data, { group, metric, kind }) {
  const maps = data.runs.map((run) => {
    const map = run.maps.find((one) => one.group === group && one.metric === metric);
    return map ? opened(map) : null;
  });
  const there = maps.filter((map) => map !== null);
  const rows = [...new Set(there.flatMap((map) => map.layers))].sort((a, b) => a - b)
    .filter((layer) => kind === "" || kindOf(data.layers[layer]) === kind);
  const range = extent(there.flatMap((map) => rows.map((layer) => valuesOf(map, layer))));
  return {
    maps, rows,
    steps: extent(there.map((map) => [map.edges[0], map.edges[map.steps.length]])),
    scale: range ? axis(range, { logarithmic: isWide(range) }) : null,
  };
}

function opened(map) {
  const { steps } = map, last = steps.length - 1;
  const edges = steps.map((step, i) => (i ? (steps[i - 1] + step) / 2 : 0));
  edges[0] = steps[0] - (last ? (steps[1] - steps[0]) / 2 : 0.5);
  edges.push(steps[last] + (last ? (steps[last] - steps[last - 1]) / 2 : 0.5));
  const rowOf = new Map(map.layers.map((layer, row) => [layer, row]));
  return { ...map, edges, rowOf, values: decoded(map.values) };
}

// What the same linear of all layers has in common: its name without the numbers.
function kindOf(layer) {
  return layer.replace(/(?<=^|\.)\d+(?=\.|$)/g, "*");
}

function valuesOf(map, layer) {
  const row = map.rowOf.get(layer), { length } = map.steps;
  return row === undefined ? [] : map.values.subarray(row * length, (row + 1) * length);
}

// The index of the column at a step, or -1 outside the map.
function columnAt(map, step) {
  if (step < map.edges[0] || step > map.edges[map.steps.length]) return -1;
  return nearest(map.steps, step);
}

function valueAt(map, layer, column) {
  return column < 0 ? NaN : valuesOf(map, layer)[column] ?? NaN;
}

// Names of rows, without the words that all of them begin with: of each layer where there is room,
// else of the numbered layer that it is in.
function rowNames(rows, layers) {
  const each = rowHeight(rows.length) >= 11, begin = commonWords(rows, layers).length;
  return rows.map((layer) => {
    const name = layers[layer].slice(begin);
    return each ? name : name.match(/^.*?\d+(?=\.|$)/)?.[0] ?? name;
  });
}

// The words that the names of all rows begin with: "decoder.layers.".
function commonWords(rows, layers) {
  const [first, ...others] = rows.map((layer) => layers[layer].split("."));
  let count = 0;
  while (others.length && count < first.length - 1
    && others.every((words) => words.length > count + 1 && words[count] === first[count])) count++;
  return count ? `${first.slice(0, count).join(".")}.` : "";
}

function rowHeight(rows) {
  return Math.min(Math.max(Math.floor(540 / rows), 3), 20);
}

// The width that names need; only the first of two maps has them.
function namesWidth(rows, layers) {
  const names = [`${commonWords(rows, layers)}*`, ...rowNames(rows, layers)];
  return Math.min(230, Math.max(...names.map((name) => name.length)) * 6.4 + 16);
}

const BARE = 8;  // the left margin of a map without names

function sizes(width, rows, left) {
  const row = rowHeight(rows);
  return { left, top: 4, row, width: Math.max(width - left - 10, 50), height: row * rows };
}

function heatMap(place, number, shared, layers, choice, pick) {
  const map = shared.maps[number], names = number === 0 ? rowNames(shared.rows, layers) : null;
  const size = sizes(place.clientWidth, shared.rows.length,
    names ? namesWidth(shared.rows, layers) : BARE);
  const [from, to] = shared.steps;
  const x = (step) => size.left + (step - from) / (to - from) * size.width;
  const canvas = element("canvas", { class: "cells" });
  canvas.style.cssText =
    `left: ${size.left}px; top: ${size.top}px; width: ${size.width}px; height: ${size.height}px`;
  const over = shape("svg", { width: place.clientWidth, height: size.top + size.height + 34 });
  over.append(...(names ? labels(names, commonWords(shared.rows, layers), size) : []));
  over.append(...stepAxis(shared, size, x));
  over.append(...marks(shared.rows, size, x, choice));
  if (map) paint(canvas, map, shared, size);
  const cell = (event) => {
    const box = canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) / size.row);
    const step = from + (event.clientX - box.left) / box.width * (to - from);
    return { layer: shared.rows[Math.min(Math.max(row, 0), shared.rows.length - 1)], step };
  };
  canvas.addEventListener("pointermove",
    (event) => tip(event, described(shared, layers, cell(event))));
  canvas.addEventListener("pointerleave", (event) => tip(event, null));
  canvas.addEventListener("click", (event) => {
    const { layer, step } = cell(event);
    const column = map ? columnAt(map, step) : -1;
    pick(layer, column < 0 ? Math.round(step) : map.steps[column]);
  });
  place.style.height = `${size.top + size.height + 34}px`;
  place.replaceChildren(canvas, over);
}

function described(shared, layers, { layer, step }) {
  const said = shared.maps.map((map, number) => {
    const column = map ? columnAt(map, step) : -1;
    if (column < 0) return shared.maps.length > 1 ? `${"AB"[number]}: no value` : "no value";
    const value = words(valueAt(map, layer, column));
    return `${shared.maps.length > 1 ? `${"AB"[number]}, ` : ""}step ${map.steps[column]}: ${value}`;
  });
  return [layers[layer], ...said].join("\n");
}

function paint(canvas, map, { rows, steps: [from, to], scale }, size) {
  const context = canvas.getContext("2d"), density = window.devicePixelRatio || 1;
  const width = canvas.width = Math.round(size.width * density);
  const height = canvas.height = Math.round(size.height * density);
  if (!scale) return;
  const palette = Array.from({ length: 256 }, (_, i) => colour(i / 255));
  const columns = Array.from({ length: width },
    (_, x) => columnAt(map, from + (x + 0.5) / width * (to - from)));
  const image = context.createImageData(width, height);
  const bytesOfLine = width * 4;
  let painted = -1;
  for (let y = 0; y < height; y++) {
    const row = Math.min(Math.floor(y * rows.length / height), rows.length - 1);
    const start = y * bytesOfLine;
    if (row === painted) {
      image.data.copyWithin(start, start - bytesOfLine, start);
      continue;
    }
    painted = row;
    const values = valuesOf(map, rows[row]);
    for (let x = 0; x < width; x++) {
      const value = columns[x] < 0 ? NaN : values[columns[x]];
      if (!Number.isFinite(value)) continue;  // stays transparent
      const [red, green, blue] = palette[Math.round(scale.at(value) * 255)];
      image.data.set([red, green, blue, 255], start + x * 4);
    }
  }
  context.putImageData(image, 0, 0);
}

// Labels of rows, of equal names the first, and not closer to each other than a line of text.
function labels(names, begin, size) {
  const below = begin ? shortened(`${begin}*`, size.left / 6.4) : "";
  const drawn = [text(size.left - 8, size.top + size.height + 16, below, "end")];
  let last = -Infinity;
  names.forEach((name, row) => {
    const y = size.top + (row + 0.5) * size.row;
    if (name === names[row - 1] || y - last < 11) return;
    drawn.push(text(size.left - 8, y + 4, shortened(name, size.left / 6.4), "end"),
      line(size.left - 5, y, size.left, y));
    last = y;
  });
  return drawn;
}

function shortened(name, most) {
  return name.length <= most ? name : `\u2026${name.slice(1 - Math.floor(most))}`;
}

function stepAxis(shared, size, x) {
  const bottom = size.top + size.height;
  const ticks = multiples(...shared.steps, Math.max(2, size.width / 110), 1);
  return [
    ...ticks.flatMap((step) => [line(x(step), bottom, x(step), bottom + 4),
      text(x(step), bottom + 16, step.toLocaleString("en-US"))]),
    text(size.left + size.width / 2, bottom + 30, "step"),
  ];
}

function marks(rows, size, x, choice) {
  const row = rows.indexOf(choice.layer), found = [];
  if (row >= 0) {
    found.push(shape("rect", { class: "mark", x: size.left - 1, width: size.width + 2,
      y: size.top + row * size.row - 1, height: size.row + 2 }));
  }
  const across = x(choice.step);
  if (choice.step !== null && across >= size.left && across <= size.left + size.width) {
    found.push(line(across, size.top, across, size.top + size.height, "mark"));
  }
  return found;
}

function colourLegend(scale) {
  if (!scale) return element("span", { class: "quiet" }, "There is no value of these layers.");
  const width = 300, x = (share) => 20 + share * width;
  const stops = COLOURS.map((rgb, i) => shape("stop", {
    offset: i / (COLOURS.length - 1), "stop-color": `rgb(${rgb})`,
  }));
  return shape("svg", { width: width + 60, height: 34, class: "legend" },
    shape("defs", {}, shape("linearGradient", { id: "colours" }, ...stops)),
    shape("rect", { x: 20, y: 2, width, height: 12, fill: "url(#colours)" }),
    ...[0, 0.5, 1].flatMap((share) => [line(x(share), 14, x(share), 18),
      text(x(share), 30, words(scale.value(share)))]));
}
