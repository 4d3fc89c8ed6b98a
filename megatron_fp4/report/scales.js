// Numbers: decoded, in words, on axes and as colours.

// The little-endian float32 numbers of a base64 text.
function decoded(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

function words(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "no value";
  const size = Math.abs(value);
  if (size >= 1e4 && size < 1e12) return Math.round(value).toLocaleString("en-US");
  if (size !== 0 && (size < 1e-3 || size >= 1e12)) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(4)));
}

// [smallest, largest] of the finite numbers in the lists, or null if there is none.
function extent(lists) {
  let low = Infinity, high = -Infinity;
  for (const list of lists) {
    for (const value of list) {
      if (value === null || !Number.isFinite(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low <= high ? [low, high] : null;
}

// An axis from low to high: at(value) is its place in [0, 1], value(place) the reverse, ticks are
// the values to be labelled.
function axis([low, high], { logarithmic = false, count = 5, least = 0 } = {}) {
  if (low === high) {
    const margin = Math.abs(low) / 2 || 1;
    if (!logarithmic) [low, high] = [low - margin, high + margin];
    else [low, high] = [low / 2, high * 2];
  }
  const of = logarithmic ? Math.log10 : (value) => value;
  const from = of(low), length = of(high) - from;
  const at = (value) => (of(value) - from) / length;
  const value = (place) => logarithmic ? 10 ** (from + place * length) : from + place * length;
  const ticks = logarithmic ? powers(low, high, count) : multiples(low, high, count, least);
  return { low, high, logarithmic, at, value, ticks };
}

// Multiples of 1, 2 or 5 times a power of ten that is at least `least`, about `count` of them.
function multiples(low, high, count, least = 0) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const factor = [1, 2, 5, 10].find((one) => one * power >= rough * 0.999);
  const step = Math.max(factor * power, least);
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) {
    ticks.push(Number((n * step).toPrecision(12)));
  }
  return ticks;
}

function powers(low, high, count) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first + 1) / count));
  const ticks = [];
  for (let n = first; n <= last; n += every) ticks.push(10 ** n);
  return ticks.length > 1 ? ticks : [low, Math.sqrt(low * high), high];
}

// Values over more than two orders of magnitude are shown on a logarithmic axis.
function isWide([low, high]) {
  return low > 0 && high / low > 100;
}

// Colours from low to high, dark to light: their order is also seen without colours.
const COLOURS = [[44, 20, 92], [42, 84, 158], [28, 140, 140], [110, 186, 90], [252, 226, 110]];

function colour(share) {
  const place = Math.min(Math.max(share, 0), 1) * (COLOURS.length - 1);
  const index = Math.min(Math.floor(place), COLOURS.length - 2), part = place - index;
  return COLOURS[index].map((low, i) => Math.round(low + (COLOURS[index + 1][i] - low) * part));
}

// The index of the number nearest to value in a sorted list that is not empty.
function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle;
    else high = middle;
  }
  return Math.abs(sorted[high] - value) < Math.abs(sorted[low] - value) ? high : low;
}
