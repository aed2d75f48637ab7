"use strict";
// Facts of the compilation, small helpers, and the words for quantities.
const facts = JSON.parse(document.getElementById("facts").textContent);
const kernels = facts.kernels;
const levels = facts.target.levels;
const byName = new Map(kernels.map(k => [k.name, k]));
const byPlan = new Map(kernels.flatMap(k => k.instances.map(i => [i.plan, k])));
const isMeasured = facts.totals.measured_us != null;

function h(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") made.style.cssText = value;
    else if (value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter(c => c != null && c !== ""));
  return made;
}

function s(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) if (value != null) made.setAttribute(name, value);
  made.append(...children.flat());
  return made;
}

function scaled(value, units) {
  for (const [unit, scale] of units) if (Math.abs(value) >= scale * 0.9995) {
    const amount = value / scale;
    return (amount >= 100 ? amount.toFixed(0) : amount >= 10 ? amount.toFixed(1) : amount.toFixed(2)) + " " + unit;
  }
  return null;
}
const size = bytes => scaled(bytes, [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) || `${Math.round(bytes)} B`;
const time = us => us == null ? "" : scaled(us, [["s", 1e6], ["ms", 1e3]]) || `${us >= 100 ? us.toFixed(0) : us.toFixed(1)} µs`;
const rate = (value, unit) => scaled(value, [["T" + unit, 1e12], ["G" + unit, 1e9], ["M" + unit, 1e6], ["k" + unit, 1e3]]) || `${value.toFixed(1)} ${unit}`;
const count = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
const percent = part => part >= 0.1 ? `${(100 * part).toFixed(0)}%` : `${(100 * part).toFixed(1)}%`;
const shape = extents => extents.length ? extents.join(" × ") : "scalar";
const spent = k => isMeasured ? k.measured_us_all_calls : k.predicted_us_all_calls;

// Colours: levels go from near (blue, green) to far (red); kinds of kernels take eight in order of their time.
const levelColour = name => {
  const place = levels.findIndex(l => l.name === name);
  return `var(--l${place < 0 ? 4 : place === levels.length - 1 ? 4 : Math.min(place, 3)})`;
};
const kindOf = k => k.summary.split(", ").slice(0, 2).map(name => name.replace(/ x\d+$/, "")).join(", ") || "other";
const kindTimes = new Map();
for (const k of kernels) kindTimes.set(kindOf(k), (kindTimes.get(kindOf(k)) || 0) + spent(k));
const kinds = [...kindTimes.keys()].sort((a, b) => kindTimes.get(b) - kindTimes.get(a));
const kindColour = kind => `var(--k${Math.min(kinds.indexOf(kind), 7)})`;

// One box follows the pointer with what lies under it; a tap shows it too.
const tip = h("div", { id: "tip", role: "status" });
document.body.append(tip);
function showTip(event) {
  const found = event.target.closest && event.target.closest("[data-tip]");
  if (!found) { tip.style.display = "none"; return; }
  tip.textContent = found.dataset.tip;
  tip.style.display = "block";
  const x = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 12), y = event.clientY + 16;
  tip.style.left = `${Math.max(8, x)}px`;
  tip.style.top = `${y + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : y}px`;
}
addEventListener("pointermove", showTip);
addEventListener("pointerdown", showTip);
addEventListener("scroll", () => { tip.style.display = "none"; }, { passive: true });
const tipOf = k => `${k.name}  ${k.summary}\n${count(k.calls, "call")}, predicted ${time(k.predicted_us_all_calls)}` +
  (isMeasured ? `, measured ${time(k.measured_us_all_calls)}` : "") + `\n${size(k.traffic_bytes)} from and to ${facts.target.main_level}`;
