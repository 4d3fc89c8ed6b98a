// The page: its parts in their order, and what is chosen.

const data = JSON.parse(document.getElementById("data").textContent);
const two = data.runs.length > 1;
const page = document.getElementById("page");
let redraws = [];  // of what depends on the width

function section(title, ...children) {
  page.append(element("h2", {}, title), ...children);
}

function heading() {
  page.append(element("h1", {}, two ? "Two runs" : data.runs[0].name));
  data.runs.forEach((run, number) => {
    const start = run.starts.at(-1), steps = run.steps.step;
    const said = [
      start ? (start.recipe ? `recipe ${start.recipe}` : "no recipe") : null,
      start?.time ? `started ${start.time}` : null,
      steps.length ? `steps ${steps[0]} to ${steps.at(-1)}` : "no steps",
      run.unreadable ? `${run.unreadable} damaged lines were left out` : null,
    ].filter((words) => words !== null).join(" \u00b7 ");
    page.append(element("p", {},
      two ? element("b", { class: `run-${number}` }, `${"AB"[number]}: ${run.name} `) : null,
      element("span", { class: "quiet" }, said)));
  });
}

function curveSection() {
  const named = (name, number) => (two ? `${"AB"[number]}, ${name}` : name);
  const series = (field, name) => data.runs.map((run, number) => ({
    name: named(name, number), run: number, steps: run.steps.step, values: run.steps[field],
  }));
  const heldOut = data.runs.map((run, number) => ({
    name: named("held-out", number), run: number, dashed: true,
    steps: run.evaluations.step, values: run.evaluations.loss,
  }));
  const charts = [
    curves("Loss", [...series("loss", "training"), ...heldOut]),
    curves("Gradient norm", series("grad_norm", "gradient norm"), { mayBeWide: true }),
    curves("Learning rate", series("learning_rate", "learning rate"), { zero: true }),
    curves("Throughput in tokens/s", series("tokens_per_second", "tokens/s"), { zero: true }),
  ];
  section("Training", element("div", { class: "grid" }, ...charts.map((chart) => chart.panel)));
  redraws.push(...charts.map((chart) => chart.draw));
}

// The chosen metric, layer and step, which heat maps and histograms share.
const choice = { group: null, metric: null, kind: "", layer: 0, step: null };

function metricsOf(group) {
  const found = data.runs.flatMap((run) => run.maps.filter((map) => map.group === group));
  return [...new Set(found.map((map) => map.metric))];
}

function mapSection() {
  const groups = [...new Set(data.runs.flatMap((run) => run.maps.map((map) => map.group)))];
  if (!groups.length) {
    section("Layers", element("p", { class: "quiet" }, "The run has logged no metrics of layers."));
    return () => {};
  }
  const controls = element("div", { class: "controls" }), note = element("p", { class: "quiet" });
  const places = data.runs.map(() => element("div", { class: "map" }));
  const panels = places.map((place, number) =>
    element("div", { class: "panel" }, runTitle(data, number), place));
  const grid = element("div", { class: `grid ${two ? "maps" : "one"}` }, ...panels);
  section("Layers", controls, grid, note);
  const kinds = [...new Set(data.layers.map(kindOf))];
  choice.group = groups[0];
  let shown = null, key = null;
  return function draw() {
    const metrics = metricsOf(choice.group);
    if (!metrics.includes(choice.metric)) choice.metric = metrics[0];
    const wanted = [choice.group, choice.metric, choice.kind].join(" ");
    if (key !== wanted) {
      key = wanted;
      shown = mapsOf(data, choice);
      controls.replaceChildren(
        choose("Operand", groups.map((group) => [group, groupWords(group)]), choice.group,
          (group) => pick({ group })),
        choose("Metric", metrics.map((one) => [one, metricWords(choice.group, one)]), choice.metric,
          (metric) => pick({ metric })),
        choose("Layers", [["", "all"], ...kinds.map((kind) => [kind, kind])], choice.kind,
          (kind) => pick({ kind })),
        colourLegend(shown.scale));
      note.textContent = noteOf(shown);
      grid.style.setProperty("--names", `${namesWidth(shown.rows, data.layers) - BARE}px`);
    }
    places.forEach((place, number) => heatMap(place, number, shown, data.layers, choice,
      (layer, step) => pick({ layer, step })));
  };
}

function noteOf(shown) {
  const thin = shown.maps.map((map, number) => (map ? thinWords(map, number) : ""));
  const without = shown.maps.map((map, number) =>
    (map ? "" : `Run ${"AB"[number]} has no such metric. `));
  const scale = shown.scale?.logarithmic ? "The scale of colours is logarithmic. " : "";
  return `${scale}${thin.join("")}${without.join("")}Click a cell to choose its layer and step.`;
}

// What to say of a map or histogram that has fewer steps here than in the run.
function thinWords({ steps, all }, number) {
  const run = two ? ` of run ${"AB"[number]}` : "";
  return all > steps.length ? `${steps.length} of ${all} steps${run} are shown. ` : "";
}

function histogramSection() {
  const keys = histogramKeys(data), steps = histogramSteps(data);
  if (!keys.length) {
    section("Histograms", element("p", { class: "quiet" }, "The run has logged no histograms."));
    return () => {};
  }
  choice.step = steps.at(-1);
  const layer = choose("Layer", data.layers.map((name, i) => [i, name]), choice.layer,
    (index) => pick({ layer: Number(index) }));
  const slider = element("input", { type: "range", min: 0, max: steps.length - 1 });
  slider.addEventListener("input", () => pick({ step: steps[slider.value] }));
  const place = element("div", { class: "grid small" });
  const thin = new Set(data.runs.flatMap((run, number) =>
    run.histograms.map((one) => thinWords(one, number))));
  section("Histograms", element("div", { class: "controls" }, layer,
    element("label", {}, "Step ", slider)), place,
  element("p", { class: "quiet" }, [...thin].join("")));
  return function draw() {
    layer.lastChild.value = choice.layer;
    slider.value = nearest(steps, choice.step);
    const charts = keys.map((key) => histogram(data, key, choice));
    place.replaceChildren(...charts.map((chart) => chart.panel));
    charts.forEach((chart) => chart.draw());
  };
}

function pick(changes) {
  Object.assign(choice, changes);
  drawMaps();
  drawHistograms();
}

function showWarning({ layer, operand, metric, step }) {
  const changes = { layer: data.layers.indexOf(layer), step };
  if (metricsOf(operand).includes(metric)) Object.assign(changes, { group: operand, metric, kind: "" });
  pick(changes);
  document.querySelector(".map")?.scrollIntoView({ block: "center" });
}

heading();
curveSection();
const drawMaps = mapSection();
const drawHistograms = histogramSection();
section("Warnings", warningList(data, showWarning));
section("Start table", ...startList(data),
  element("div", { class: `grid ${two ? "" : "one"}` }, ...startTables(data)));
section("Environment", element("div", { class: "panel" }, settings(data, "environment")));
section("Arguments", element("div", { class: "panel" }, settings(data, "arguments")));
redraws.push(drawMaps, drawHistograms);
redraws.forEach((draw) => draw());

let waiting = 0;
window.addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => redraws.forEach((draw) => draw()), 100);
});
