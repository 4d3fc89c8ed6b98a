// Warnings, the start table, and what a run was started with.

function warningList(data, show) {
  const all = data.runs.flatMap((run, number) => run.warnings.map((one) => ({ ...one, number })));
  if (!all.length) return element("p", { class: "quiet" }, "There are no warnings.");
  all.sort((a, b) => a.step - b.step);
  const rows = all.map((one) => element("li", {},
    data.runs.length > 1 ? element("b", { class: `run-${one.number}` }, "AB"[one.number]) : null,
    data.layers.includes(one.layer) ? element("button", { onclick: () => show(one) }, "show") : null,
    element("span", { class: "quiet step" }, `step ${one.step.toLocaleString("en-US")}`),
    element("span", {}, one.line)));
  return element("div", { class: "panel scroll" }, element("ul", { class: "warnings" }, ...rows));
}

function runTitle(data, number) {
  return data.runs.length > 1
    ? element("h3", { class: `run-${number}` }, `${"AB"[number]}: ${data.runs[number].name}`)
    : null;
}

// The start table of the last start of each run; lines that the other has not are highlighted.
function startTables(data) {
  const last = data.runs.map((run) => run.starts.at(-1));
  return last.map((start, number) => {
    const others = last.filter((one, other) => one && other !== number);
    const differs = (words) => others.length > 0 && !others[0].lines.includes(words);
    const rows = (start?.lines ?? []).map((words) =>
      element("span", { class: differs(words) && "differs" }, words));
    return element("div", { class: "panel" }, runTitle(data, number), rows.length
      ? element("div", { class: "scroll" }, element("pre", {}, ...rows))
      : element("p", { class: "quiet" }, "The run has logged no start table."));
  });
}

// When each run was started, and what changed from one start to the next.
function startList(data) {
  return data.runs.flatMap((run, number) => run.starts.length < 2 ? [] : [
    element("div", { class: "panel" }, runTitle(data, number),
      element("p", {}, `The run was started ${run.starts.length} times.`),
      table(["time", "from step", "recipe", "what changed"], run.starts.map((start, i) => [
        start.time, String(start.step), start.recipe || "none",
        start.changes.join("; ") || (i ? "nothing" : ""),
      ]))),
  ]);
}

function table(heads, rows, differs = () => false) {
  return element("table", {},
    element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", {}, head)))),
    element("tbody", {}, ...rows.map((row) => element("tr", { class: differs(row) && "differs" },
      ...row.map((cell) => element("td", {}, cell))))));
}

// The values of the last start of each run, under their names; those that differ are highlighted.
function settings(data, part) {
  const values = data.runs.map((run) => run.starts.at(-1)?.[part] ?? {});
  const names = [...new Set(values.flatMap((one) => Object.keys(one)))].sort();
  if (!names.length) return element("p", { class: "quiet" }, `The run has logged no ${part}.`);
  const two = data.runs.length > 1;
  const valueOf = (one, name) => (Object.hasOwn(one, name) ? one[name] : "(not set)");
  const rows = names.map((name) => [name, ...values.map((one) => valueOf(one, name))]);
  const differing = rows.filter((row) => two && row[1] !== row[2]);
  const place = element("div", { class: "scroll" });
  const fillIn = (few) => place.replaceChildren(table(["name", ...(two ? ["A", "B"] : ["value"])],
    few ? differing : rows, (row) => two && row[1] !== row[2]));
  fillIn(two && differing.length > 0);
  const box = two && differing.length ? element("label", {}, element("input", {
    type: "checkbox", checked: "", onchange: (event) => fillIn(event.target.checked),
  }), ` only the ${differing.length} of ${rows.length} that differ`) : null;
  const same = two && !differing.length
    ? element("p", { class: "quiet" }, "Both runs have the same values.") : null;
  return element("div", {}, box, same, place);
}
