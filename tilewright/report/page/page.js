// Puts the page together.
function start() {
  document.body.classList.toggle("untimed", !isMeasured);
  const legend = document.getElementById("kinds");
  const all = kernels.reduce((sum, k) => sum + spent(k), 0);
  const share = some => percent(some.reduce((sum, kind) => sum + kindTimes.get(kind), 0) / Math.max(all, 1e-9));
  for (const kind of kinds.slice(0, 7))
    legend.append(h("button", { class: "chip", type: "button", "data-kind": kind, "aria-pressed": "false", onclick: () => chooseKind(kind) },
      h("i", { class: "dot", style: `background:${kindColour(kind)}` }), `${kind} ${share([kind])}`));
  const rest = kinds.slice(7);
  if (rest.length) legend.append(h("span", { class: "chip" }, h("i", { class: "dot", style: "background:var(--k7)" }), `${count(rest.length, "other kind")} ${share(rest)}`));
  chart(document.getElementById("time"), drawTime);
  chart(document.getElementById("roofline"), drawRoofline);
  const roofs = document.getElementById("roofs");
  const key = (colour, words) => h("span", { class: "chip" }, h("i", { class: "dot", style: `background:${colour}` }), words);
  roofs.append(key("var(--ink)", `arithmetic ${rate(facts.target.operations_a_second, "op/s")}`),
    ...levels.slice(1).filter(l => l.bytes_a_second).map(l => key(levelColour(l.name), `${l.name} ${rate(l.bytes_a_second, "B/s")}`)));
  const memory = document.getElementById("memory");
  if (facts.memory && facts.memory.bytes && facts.memory.tensors.length) chart(memory, drawMemory);
  else memory.textContent = facts.memory ? "No intermediate tensor crosses from one kernel to another." : "Compilation stopped before memory was laid out.";
  if (!isMeasured) order.querySelector("[value=error]").remove();
  found.addEventListener("input", listKernels);
  order.addEventListener("change", listKernels);
  listKernels();
  stored();
  if (location.hash.length > 1) openKernel(decodeURIComponent(location.hash.slice(1)));
}

// What still goes through main memory, the most bytes first: equal kernels count with all their calls.
function stored() {
  const place = document.getElementById("stored"), pairs = new Map();
  for (const k of kernels) for (const i of k.instances) for (const p of i.neighbours) if (p.level === main) {
    const other = byPlan.get(p.reader_plan), reason = p.tried.filter(t => !t.chosen).map(t => `${t.level} ${t.reason.replace(/\S*\d+\S*/g, "#")}`).join();
    const key = `${k.name} ${other && other.name} ${p.bytes} ${reason}`;
    const known = pairs.get(key);
    if (known) { known.times += i.steps; known.bytes += p.bytes * i.steps; }
    else pairs.set(key, { k, p, times: i.steps, bytes: p.bytes * i.steps });
  }
  const sorted = [...pairs.values()].sort((a, b) => b.bytes - a.bytes);
  if (!sorted.length) { place.append(h("p", {}, `Nothing: no intermediate tensor goes through ${main}.`)); return; }
  const show = x => h("div", {}, h("div", { class: "small soft", style: "margin-top:10px" }, `${size(x.bytes)}${x.times > 1 ? ` in ${x.times} places` : ""}, made in `,
    h("button", { class: "link", onclick: () => openKernel(x.k.name) }, x.k.name)), edge(x.p));
  place.append(...sorted.slice(0, 6).map(show));
  if (sorted.length > 6) place.append(more(`${count(sorted.length - 6, "more pair")}`, () => sorted.slice(6).map(show)));
}

const system = matchMedia("(prefers-color-scheme: dark)"), root = document.documentElement;
const paint = () => { root.dataset.theme = system.matches ? "dark" : "light"; };
system.addEventListener("change", paint);
paint();
document.getElementById("theme").addEventListener("click", () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; });
if (kernels.length) start();
