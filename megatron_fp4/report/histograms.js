// Histograms of one layer at one step.

const AXES = {
  scales: "exponent of a block's scale",
  confidences: "QuantConf",
};

function histogramKeys(data) {
  const keys = new Map();
  for (const run of data.runs) {
    for (const { group, metric } of run.histograms) {
      keys.set(`${group} ${metric}`, { group, metric });
    }
  }
  return [...keys.values()];
}

// The steps at which any run keeps a histogram.
function histogramSteps(data) {
  const steps = data.runs.flatMap((run) => run.histograms.flatMap((one) => one.steps));
  return [...new Set(steps)].sort((a, b) => a - b);
}

// What one run has of a histogram at the step nearest to `step`, or null.
function histogramAt(run, { group, metric }, layer, step) {
  const found = run.histograms.find((one) => one.group === group && one.metric === metric);
  const kept = found?.layers[layer];
  if (!kept || !kept.bins) return null;
  const all = decoded(kept.counts), { bins } = kept;
  const known = found.steps.filter((_, row) => !Number.isNaN(all[row * bins]));
  const chosen = known[nearest(known, step)], row = found.steps.indexOf(chosen);
  const counts = [...all.slice(row * bins, (row + 1) * bins)];
  const total = counts.reduce((sum, count) => sum + count, 0);
  return { first: kept.first, width: found.width, step: chosen, counts, total };
}

function histogram(data, key, choice) {
  const title = `${key.metric} of ${groupWords(key.group)}`;
  const found = data.runs.map((run) => histogramAt(run, key, choice.layer, choice.step));
  const place = element("div", { class: "bars" });
  const said = found.map((one, number) => element("span", { class: `run-${number}` },
    one ? `step ${one.step.toLocaleString("en-US")}` : "no values"));
  const panel = element("div", { class: "panel" }, element("h3", {}, title),
    element("div", { class: "readout" }, ...said), place);
  const there = found.filter((one) => one?.total);
  const name = entry(AXES, key.metric) ?? key.metric;
  const draw = () => {
    if (there.length) place.replaceChildren(bars(place.clientWidth, found, there, name));
  };
  return { panel, draw };
}

function bars(width, found, there, name) {
  const height = 150, left = 40, right = width - 8, bottom = height - 32, top = 6;
  const step = there[0].width;
  const first = Math.min(...there.map((one) => one.first));
  const end = Math.max(...there.map((one) => one.first + one.counts.length * step));
  const bins = Math.round((end - first) / step);
  const share = (one, bin) => {
    const count = one.counts[bin - Math.round((one.first - first) / step)];
    return count && one.total ? count / one.total : 0;
  };
  const shares = there.flatMap((one) => one.counts.map((count) => count / one.total));
  const up = axis([0, Math.max(...shares)], { count: 3 });
  const x = (bin) => left + bin / bins * (right - left);
  const y = (value) => bottom - up.at(value) * (bottom - top);
  const picture = shape("svg", { width, height });
  for (const value of up.ticks) {
    picture.append(line(left, y(value), right, y(value)),
      text(left - 4, y(value) + 4, `${words(value * 100)}%`, "end"));
  }
  const every = Math.ceil(bins / Math.max(1, (right - left) / 34));
  const begin = (bin) => Number((first + bin * step).toPrecision(6));
  for (let bin = 0; bin < bins; bin++) {
    const middle = step === 1 ? x(bin + 0.5) : x(bin);  // an exponent is a value, others are ranges
    if (bin % every === 0) picture.append(text(middle, bottom + 13, String(begin(bin))));
  }
  found.forEach((one, number) => one && picture.append(
    number ? stairs(one, share, bins, x, y) : filled(one, share, bins, x, y)));
  for (let bin = 0; bin < bins; bin++) {
    const said = there.map((one) => `${words(share(one, bin) * 100)}%`).join(" and ");
    picture.append(shape("rect", { x: x(bin), y: top, width: x(1) - x(0), height: bottom - top,
      fill: "transparent" }, shape("title", {}, `${begin(bin)}: ${said}`)));
  }
  picture.append(text((left + right) / 2, height - 4, name));
  return picture;
}

function filled(one, share, bins, x, y) {
  const group = shape("g", { class: "run-0" });
  for (let bin = 0; bin < bins; bin++) {
    group.append(shape("rect", { class: "bar", x: x(bin) + 0.5, y: y(share(one, bin)),
      width: Math.max(x(1) - x(0) - 1, 0.5), height: y(0) - y(share(one, bin)) }));
  }
  return group;
}

function stairs(one, share, bins, x, y) {
  let path = `M${x(0)},${y(0)}`;
  for (let bin = 0; bin < bins; bin++) path += `V${y(share(one, bin))}H${x(bin + 1)}`;
  return shape("g", { class: "run-1" }, shape("path", { class: "curve", d: `${path}V${y(0)}` }));
}
