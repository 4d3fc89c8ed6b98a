// Curves over steps, as SVG.

const MARGIN = { left: 62, right: 14, top: 8, bottom: 30 };

// series: name, run (its number), steps, values; dashed ones have dots if they are few.
// options: zero, whether the axis begins at 0; mayBeWide, whether it may be logarithmic.
function curves(title, series, options = {}) {
  const shown = series.filter((one) => extent([one.values]) !== null);
  const readout = element("div", { class: "readout" });
  const place = element("div");
  const panel = element("div", { class: "panel" }, element("h3", {}, title), readout, place);
  if (!shown.length) {
    readout.append(element("span", { class: "quiet" }, "The run has logged none."));
    return { panel, draw: () => {} };
  }
  const read = (step) => readout.replaceChildren(
    ...(step === null ? [] : [element("span", {}, `step ${step.toLocaleString("en-US")}`)]),
    ...shown.map((one) => legend(one, step)));
  read(null);
  return { panel, draw: () => place.replaceChildren(drawn(place.clientWidth, shown, options, read)) };
}

function legend(one, step) {
  const mark = shape("svg", { width: 22, height: 10, style: "display: inline-block" },
    line(0, 6, 20, 6, `curve ${one.dashed ? "dashed" : ""}`));
  let value = "";
  if (step !== null) {
    const index = nearest(one.steps, step);
    const elsewhere = one.steps[index] === step ? "" : ` (step ${one.steps[index]})`;
    value = `: ${words(one.values[index])}${elsewhere}`;
  }
  return element("span", { class: `run-${one.run}` }, mark, ` ${one.name}${value}`);
}

function drawn(width, series, options, read) {
  const height = 230, right = width - MARGIN.right, bottom = height - MARGIN.bottom;
  const range = extent(series.map((one) => one.values));
  if (options.zero) range[0] = Math.min(range[0], 0);
  const across = axis(extent(series.map((one) => one.steps)), { count: 6, least: 1 });
  const up = axis(range, { logarithmic: options.mayBeWide && isWide(range) });
  const x = (step) => MARGIN.left + across.at(step) * (right - MARGIN.left);
  const y = (value) => bottom - up.at(value) * (bottom - MARGIN.top);
  const picture = shape("svg", { width, height, role: "img" });
  for (const value of up.ticks) {
    picture.append(line(MARGIN.left, y(value), right, y(value)),
      text(MARGIN.left - 6, y(value) + 4, words(value), "end"));
  }
  for (const step of across.ticks) {
    picture.append(text(x(step), bottom + 16, step.toLocaleString("en-US")));
  }
  picture.append(text((MARGIN.left + right) / 2, height - 1, up.logarithmic
    ? "step (vertical axis: logarithmic)" : "step"));
  for (const one of series) picture.append(curve(one, x, y));
  picture.append(follower(picture, series, across, x, bottom, read));
  return picture;
}

function curve(one, x, y) {
  const group = shape("g", { class: `run-${one.run}` });
  group.append(shape("path", {
    class: `curve ${one.dashed ? "dashed" : ""}`, d: outline(one, x, y),
  }));
  if (one.steps.length === 1 || (one.dashed && one.steps.length <= 40)) {
    one.steps.forEach((step, i) => {
      if (one.values[i] === null) return;
      group.append(shape("circle", { class: "dot", cx: x(step), cy: y(one.values[i]), r: 3 }));
    });
  }
  return group;
}

// A path through the values, broken where one is missing. Of the values in a column of pixels, the
// first, the smallest, the largest and the last are kept.
function outline({ steps, values }, x, y) {
  const parts = [];
  let broken = true, column = null, held = [];
  const flush = () => {
    if (!held.length) return;
    const sorted = [...held].sort((a, b) => values[a] - values[b]);
    const kept = new Set([held[0], sorted[0], sorted[sorted.length - 1], held[held.length - 1]]);
    for (const i of [...kept].sort((a, b) => a - b)) {
      parts.push(`${broken ? "M" : "L"}${x(steps[i]).toFixed(1)},${y(values[i]).toFixed(1)}`);
      broken = false;
    }
    held = [];
  };
  steps.forEach((step, i) => {
    if (values[i] === null) {
      flush();
      broken = true;
      return;
    }
    const here = Math.round(x(step));
    if (here !== column) flush();
    column = here;
    held.push(i);
  });
  flush();
  return parts.join("");
}

// A vertical line at the logged step that is nearest to the pointer; `read` shows its values.
function follower(picture, series, across, x, bottom, read) {
  const cursor = line(0, MARGIN.top, 0, bottom, "cursor");
  cursor.style.display = "none";
  const longest = series.reduce((a, b) => (b.steps.length > a.steps.length ? b : a));
  picture.addEventListener("pointermove", (event) => {
    const place = (event.clientX - picture.getBoundingClientRect().left - x(across.low))
      / (x(across.high) - x(across.low));
    const pointed = across.low + place * (across.high - across.low);
    const step = longest.steps[nearest(longest.steps, pointed)];
    cursor.setAttribute("x1", x(step));
    cursor.setAttribute("x2", x(step));
    cursor.style.display = "";
    read(step);
  });
  picture.addEventListener("pointerleave", () => {
    cursor.style.display = "none";
    read(null);
  });
  return cursor;
}
