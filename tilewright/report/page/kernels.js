// The list of kernels: found, ordered, and opened one at a time; what is inside is made when it is opened.
const main = facts.target.main_level;
const list = document.getElementById("list"), found = document.getElementById("found"), order = document.getElementById("order");
const rows = new Map();
let chosenKind = null;

function row(k) {
  const most = Math.max(...kernels.map(x => Math.max(x.predicted_us_all_calls, x.measured_us_all_calls || 0)), 1e-9);
  const bar = (us, kind) => us == null ? null : h("i", { class: kind, style: `width:${100 * us / most}%;background:${kindColour(kindOf(k))}` });
  const cell = (tag, text, kind) => h("span", { class: `num ${kind || ""}` }, text && [h("span", { class: "tag" }, tag), text]);
  const made = h("details", { class: "kernel", id: `kernel-${k.name}`, ontoggle: () => {
    if (made.open && made.children.length === 1) made.append(inside(k));
  } }, h("summary", {}, h("span", { class: "name" }, k.name), h("span", { class: "ops" }, k.summary),
    h("span", { class: "num calls" }, k.calls > 1 ? `× ${k.calls.toLocaleString("en")}` : ""),
    h("span", { class: "bars" }, bar(k.predicted_us_all_calls, "pred"), bar(k.measured_us_all_calls, "meas")),
    cell("predicted", time(k.predicted_us_all_calls)), cell("measured", time(k.measured_us_all_calls), "timed"), cell(main, size(k.traffic_bytes))));
  return made;
}

const text = k => [k.name, k.summary, k.root, ...k.nodes, ...k.nests.map(n => n.tensor), ...k.instances.map(i => i.root)].join("\n").toLowerCase();
const texts = new Map();
const orders = {
  time: (a, b) => spent(b) - spent(a), traffic: (a, b) => b.traffic_bytes - a.traffic_bytes,
  error: (a, b) => Math.abs(Math.log(b.measured_us_all_calls / b.predicted_us_all_calls)) - Math.abs(Math.log(a.measured_us_all_calls / a.predicted_us_all_calls)),
  order: (a, b) => kernels.indexOf(a) - kernels.indexOf(b),
};
function listKernels() {
  const words = found.value.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = kernels.filter(k => (!chosenKind || kindOf(k) === chosenKind) && words.every(w => {
    if (!texts.has(k)) texts.set(k, text(k));
    return texts.get(k).includes(w);
  })).sort(orders[order.value]);
  for (const k of shown) if (!rows.has(k)) rows.set(k, row(k));
  list.replaceChildren(...shown.map(k => rows.get(k)));
  const share = shown.reduce((sum, k) => sum + spent(k), 0) / Math.max(1e-9, kernels.reduce((sum, k) => sum + spent(k), 0));
  document.getElementById("shown").textContent = shown.length === kernels.length ? `${count(kernels.length, "kernel")}, the heaviest first` :
    `${shown.length} of ${count(kernels.length, "kernel")}, ${percent(share)} of the time`;
}
function openKernel(name) {
  const k = byName.get(name);
  if (!k) return;
  if (!rows.has(k) || !rows.get(k).isConnected) { found.value = ""; chooseKind(null); }
  const made = rows.get(k);
  made.open = true;
  if (made.children.length === 1) made.append(inside(k));
  made.scrollIntoView({ block: "start" });
  history.replaceState(null, "", `#${name}`);
}
function chooseKind(kind) {
  chosenKind = chosenKind === kind ? null : kind;
  document.querySelectorAll("#kinds .chip").forEach(c => c.setAttribute("aria-pressed", String(c.dataset.kind === chosenKind)));
  listKernels();
}

const fact = (name, value) => value == null || value === "" ? null : h("div", {}, h("span", {}, name), value);
function inside(k) {
  const ratio = k.measured_us == null || !k.predicted_us ? "" : `, ${(k.measured_us / k.predicted_us).toFixed(2)} of predicted`;
  const traffic = k.levels.map(l => fact(`${l.level}, all calls`, `${size(l.read_bytes)} read, ${size(l.written_bytes)} written`));
  const room = levels.find(l => l.name === k.footprint_level);
  const made = h("div", { class: "inside" },
    h("div", { class: "facts" },
      fact("result", h("code", {}, `${k.root} [${k.root_shape.join(", ")}]`)),
      fact("predicted, a call", k.launch ? `in the launch of ${k.launch}` : time(k.predicted_us)),
      fact("corrected by records, a call", k.corrected_us == null ? null : time(k.corrected_us)),
      fact("measured in records, a call", k.recorded_us == null ? null : time(k.recorded_us)),
      fact("measured, a call", k.measured_us == null ? null : time(k.measured_us) + ratio),
      ...traffic,
      fact("its tensors once, by its loops", k.counted_bytes == null ? null : size(k.counted_bytes)),
      fact("operations, a call", k.operations ? rate(k.operations, "op").replace("op", "") + (spent(k) ? ` at ${rate(1e6 * k.operations * k.calls / spent(k), "op/s")}` : "") : null),
      fact("tiles", `${k.tiles.toLocaleString("en")}${k.block_threads > 1 ? ` of ${k.block_threads} threads` : ""}`),
      fact(`held at ${k.footprint_level}`, k.footprint_bytes ? `${size(k.footprint_bytes)}, ${percent(k.footprint_bytes / room.bytes)} of it` : null),
      fact("in every step of", k.scan)),
    k.reason ? h("p", { class: "small" }, k.reason + ".") : null,
    h("h3", {}, "Levels: what is computed where, and what is held there"), tree(k));
  const pairs = k.instances[0].neighbours;
  if (pairs.length) made.append(more(`Neighbours: ${count(pairs.length, "pair")}`, () => pairs.map(p => edge(p)), pairs.length <= 12));
  if (k.instances.length > 1) made.append(more(`Also called for ${count(k.instances.length - 1, "equal kernel")}`, () =>
    [h("p", { class: "small" }, h("code", {}, k.instances.slice(1).map(i => i.root).join(", ")))]));
  made.append(more(`Nodes of the model: ${k.nodes.length}`, () => [h("p", { class: "small" }, k.nodes.join(", "))]));
  const code = sources()[k.launch || k.name];
  if (code) made.append(more(`Code: ${count(code.split("\n").length, "line")}`, () => [h("pre", { tabindex: 0 }, ...coloured(code))]));
  return made;
}
function more(title, fill, open) {
  const made = h("details", { class: "more", ontoggle: () => { if (made.open && made.children.length === 1) made.append(...fill()); } }, h("summary", {}, title));
  if (open) { made.open = true; made.append(...fill()); }
  return made;
}

// --- the tree of tiles, a box a level

const OVER = { cores: "handed out to the cores", blocks: "handed out to blocks", order: "one after the other", lanes: "shared by threads" };
function box(level, head, holds, body) {
  return h("div", { class: "box", style: `--level:${levelColour(level)}`, "data-level": level },
    h("div", { class: "head" }, h("b", {}, level), h("span", { class: "small" }, head)),
    holds.length ? h("div", { class: "holds" }, ...holds) : null, h("div", { class: "body" }, ...body));
}
function chip(words, name, bytes, note) {
  return h("span", { class: "hold" }, words ? h("em", {}, words + " ") : null, h("code", {}, name), h("em", {}, ` ${size(bytes)}${note || ""}`));
}
function tree(k) {
  // between kernels a tensor is in main memory, or stays in a cache that all units share
  const words = r => r.role === "weight" ? "reads weights" : r.role === "input" ? "reads input" : "reads";
  const held = k.reads.slice(0, 12).map(r => [r.level, chip(words(r), r.tensor, r.bytes)]);
  if (k.reads.length > 12) held.push([main, h("span", { class: "hold" }, `and reads ${k.reads.length - 12} more`)]);
  held.push(...k.writes.map(w => [w.level, chip("writes", w.tensor, w.bytes)]));
  const around = levels.filter(l => l.name === main || held.some(([level]) => level === l.name));
  return around.reduce((body, l) => box(l.name, l.name === main ? "what the kernel takes and leaves" : "what stays there between kernels",
    held.filter(([level]) => level === l.name).map(([, made]) => made), [body]), node(k.tree));
}
function node(n) {
  if (n.kind === "leaf") return leaf(n);
  if (n.kind === "barrier") return h("div", { class: "leaf" }, n.text);
  const cut = n.sizes.map(z => z.size >= z.extent ? `${z.along[0] || z.axis} whole` : `${(z.along[0] || z.axis)} by ${z.size} of ${z.extent}`).join(", ");
  const how = n.over === "lanes" ? `shared by ${n.count} threads` : OVER[n.over] || n.over;
  const head = `${n.parts > 1 ? `${n.parts.toLocaleString("en")} parts ` : "one part "}${how}${cut ? `: ${cut}` : ""}`;
  const holds = n.holds.map(x => chip({ store: x.fill ? x.fill === "prefetch" ? "prefetches" : "keeps" : "holds", carry: "carries", rolling: "window of" }[x.mode],
    x.tensor, x.bytes, x.bytes < x.whole_bytes ? ` of ${size(x.whole_bytes)}` : ""));
  return box(n.level, head, holds, n.body.map(node));
}
function leaf(n) {
  const kindsOf = names => [...new Set(names.map(x => x.split(" node ")[0]))].join(" + ");
  if (n.part === "start" || n.part === "finish") return h("div", { class: "leaf small" }, `${n.part === "start" ? "begin" : "end"} `, h("code", {}, n.tensor));
  const registers = Object.entries(n.register).map(([a, x]) => `${a}:${x}`).join(" ");
  const words = [registers && `tile ${registers}`, n.vector && `vectors of ${n.lanes} along ${n.vector}`, n.instruction,
    n.epilogue.length && count(n.epilogue.length, "map") + " on the result",
    n.composed.length && `${count(n.composed.length, "map")} computed again: ${kindsOf(n.recomputed)}`].filter(Boolean).join("; ");
  return h("div", { class: "leaf" }, h("div", {}, h("b", {}, kindsOf(n.nodes) || n.core), " ", h("code", {}, n.tensor), " ",
    h("span", { class: "soft small" }, `${n.part === "step" ? "a step, " : ""}${shape(n.shape)}`)),
    box(levels[0].name, words || "element by element", [], []));
}

// --- pairs of neighbours, and code

function edge(p) {
  const other = byPlan.get(p.reader_plan);
  const tried = p.tried.filter(t => t.chosen || t.reason || t.predicted_us);
  return h("div", { class: "edge" },
    h("div", {}, h("code", {}, p.tensor), h("span", { class: "soft" }, ` ${size(p.bytes)} to `), h("code", {}, p.reader),
      p.reader_plan !== p.plan && other ? [" in ", h("button", { class: "link", onclick: () => openKernel(other.name) }, other.name)] : ""),
    h("div", { class: "tried" }, ...tried.flatMap(t => [
      h("span", { class: t.chosen ? "level chosen" : "level" }, h("i", { class: "dot", style: `background:${levelColour(t.level)}` }), t.level, t.chosen ? " ✓" : ""),
      h("span", { class: "num" }, t.predicted_us ? time(t.predicted_us) : "–"),
      h("span", { class: "why" }, t.chosen ? "chosen" : t.reason || "slower")])));
}
let texts_of_kernels = null;
function sources() {
  if (!texts_of_kernels) texts_of_kernels = JSON.parse(document.getElementById("sources").textContent);
  return texts_of_kernels;
}
const TOKENS = /(\/\/[^\n]*|\/\*[\s\S]*?\*\/)|\b(for|if|else|while|return|static|inline|const|struct|typedef|void|restrict|extern|template|__global__|__device__|__shared__|#\w+)\b|\b(float|double|int|char|long|short|unsigned|bool|u?int(?:8|16|32|64)_t|size_t|v\d+[a-z]+\d+u?)\b|\b(\d[\w.+-]*)\b/g;
function coloured(code) {
  const parts = [];
  let at = 0;
  for (const m of code.matchAll(TOKENS)) {
    parts.push(code.slice(at, m.index), h("span", { class: m[1] ? "c" : m[2] ? "k" : m[3] ? "t" : "n" }, m[0]));
    at = m.index + m[0].length;
  }
  parts.push(code.slice(at));
  return parts;
}
