"use strict";
// Elements of the page. What comes from files is set as text or as an attribute, never as HTML.

window.addEventListener("error", (event) => {
  document.body.prepend(element("p", { class: "failure" },
    `The script of this page failed: ${event.message} (line ${event.lineno})`));
});

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function shape(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function text(x, y, words, anchor = "middle") {
  return shape("text", { x, y, "text-anchor": anchor }, words);
}

function line(x1, y1, x2, y2, kind = "rule") {
  return shape("line", { x1, y1, x2, y2, class: kind });
}

function choose(label, options, chosen, change) {
  const list = element("select", { onchange: () => change(list.value) },
    ...options.map(([value, words]) => element("option", { value }, words)));
  list.value = chosen;
  return element("label", {}, `${label} `, list);
}

function tip(event, words) {
  const shown = document.getElementById("tip");
  shown.hidden = words === null;
  if (words === null) return;
  shown.textContent = words;
  const { width, height } = shown.getBoundingClientRect();
  shown.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  shown.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 8))}px`;
}
