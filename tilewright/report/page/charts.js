// Pictures in the width they get: drawn again when the window changes, so that their text keeps its size.
const drawn = [];
function chart(place, draw) {
  const again = () => {
    const width = Math.max(240, place.clientWidth - 22);
    place.replaceChildren(draw(width));
  };
  drawn.push(again);
  again();
}
let waiting = 0;
addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => drawn.forEach(d => d()), 120); });
addEventListener("click", event => {
  const found = event.target.closest && event.target.closest("svg [data-kernel]");
  if (found) openKernel(found.dataset.kernel);
});

function drawTime(width) {
  const rows = [["predicted", k => k.predicted_us], ...(isMeasured ? [["measured", k => k.measured_us]] : [])];
  const calls = facts.order.length ? facts.order.map(n => byName.get(n)).filter(Boolean) : kernels.flatMap(k => Array(k.calls).fill(k));
  const longest = Math.max(...rows.map(([, of]) => calls.reduce((sum, k) => sum + of(k), 0))) || 1;  // an edited plan may predict nothing
  const svg = s("svg", { viewBox: `0 0 ${width} ${rows.length * 58}`, role: "img", "aria-label": "time of every call, in order" });
  rows.forEach(([name, of], row) => {
    let at = 0, run = null;
    const total = calls.reduce((sum, k) => sum + of(k), 0);
    svg.append(s("text", { x: 0, y: row * 58 + 13 }, `${name} ${time(total)}`));
    const put = () => {
      if (!run) return;
      const x = at / longest * width, w = run.us / longest * width;
      svg.append(s("rect", { x: x.toFixed(2), y: row * 58 + 20, width: Math.max(w - (w > 4 ? 1 : 0), .35).toFixed(2), height: 30,
        fill: kindColour(kindOf(run.kernel)), "data-kernel": run.kernel.name, "data-tip": tipOf(run.kernel) }));
      at += run.us;
    };
    for (const k of calls) {  // calls of one kernel in a row are one piece
      if (run && run.kernel === k) run.us += of(k);
      else { put(); run = { kernel: k, us: of(k) }; }
    }
    put();
  });
  return svg;
}

function drawRoofline(width) {
  const height = Math.min(420, Math.max(300, width * .62)), left = 46, bottom = 40, top = 12, right = 10;
  const points = kernels.filter(k => k.operations > 0 && k.traffic_bytes > 0 && spent(k) > 0)
    .map(k => ({ k, x: k.operations * k.calls / k.traffic_bytes, y: 1e6 * k.operations * k.calls / spent(k) }));
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "roofline: operations a second by operations a byte" });
  if (!points.length) return svg;
  const peak = facts.target.operations_a_second;
  const roofs = levels.slice(1).map(l => ({ name: l.name, rate: l.bytes_a_second })).filter(r => r.rate);
  const low = Math.min(...points.map(p => p.x)), high = Math.max(...points.map(p => p.x));
  const x0 = Math.floor(Math.log10(Math.min(low, .1))), x1 = Math.ceil(Math.log10(Math.max(high * 1.5, 10)));
  const y0 = Math.log10(Math.min(peak / 100, ...points.map(p => p.y / 2))), y1 = Math.log10(peak * 2.2);
  const X = v => left + (Math.log10(v) - x0) / (x1 - x0) * (width - left - right);
  const Y = v => top + (y1 - Math.log10(v)) / (y1 - y0) * (height - top - bottom);
  const tick = e => e < 0 ? `1/${10 ** -e}` : (10 ** e).toLocaleString("en");
  const every = Math.ceil((x1 - x0) / (width < 420 ? 5 : 8));
  for (let e = x0; e <= x1; e++) {
    svg.append(s("line", { x1: X(10 ** e), x2: X(10 ** e), y1: top, y2: height - bottom, stroke: "var(--line)" }));
    if ((e - x0) % every === 0) svg.append(s("text", { x: X(10 ** e), y: height - bottom + 16, "text-anchor": e === x1 ? "end" : "middle" }, tick(e)));
  }
  for (let e = Math.ceil(y0); e <= y1; e++) {
    svg.append(s("line", { x1: left, x2: width - right, y1: Y(10 ** e), y2: Y(10 ** e), stroke: "var(--line)" }));
    svg.append(s("text", { x: left - 6, y: Y(10 ** e) + 4, "text-anchor": "end" }, rate(10 ** e, "").replace(/\.0+|\.\d+/, "").replace(" ", "")));
  }
  svg.append(s("text", { x: width - right, y: height - 6, "text-anchor": "end" }, `operations a byte of ${facts.target.main_level}`));
  svg.append(s("line", { x1: X(Math.max(10 ** x0, peak / Math.max(...roofs.map(r => r.rate)))), x2: width - right, y1: Y(peak), y2: Y(peak), stroke: "var(--ink)", "stroke-width": 2 }));
  for (const roof of roofs) {
    const from = Math.max(10 ** x0, 10 ** y0 / roof.rate), to = Math.min(10 ** x1, peak / roof.rate);
    if (to > from) svg.append(s("line", { x1: X(from), y1: Y(roof.rate * from), x2: X(to), y2: Y(roof.rate * to), stroke: levelColour(roof.name), "stroke-width": 2 }));
  }
  const most = Math.max(...points.map(p => spent(p.k)));
  for (const p of points.sort((a, b) => spent(b.k) - spent(a.k)))
    svg.append(s("circle", { cx: X(p.x).toFixed(1), cy: Math.max(Y(p.y), top + 3).toFixed(1), r: (3 + 10 * Math.sqrt(spent(p.k) / most)).toFixed(1),
      fill: kindColour(kindOf(p.k)), "fill-opacity": .72, stroke: "var(--card)", "data-kernel": p.k.name,
      "data-tip": `${tipOf(p.k)}\n${rate(p.y, "op/s")}, ${p.x.toPrecision(3)} operations a byte` }));
  return svg;
}

function drawMemory(width) {
  const memory = facts.memory, calls = Math.max(1, facts.order.length), height = 300, top = 26, bottom = 22;
  const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "places of intermediate tensors in the arena, over the calls" });
  const X = call => call / calls * width, Y = at => top + (1 - at / memory.bytes) * (height - top - bottom);
  svg.append(s("text", { x: 0, y: 14, class: "strong" }, `arena ${size(memory.bytes)}`));
  svg.append(s("line", { x1: 0, x2: width, y1: top, y2: top, stroke: "var(--line)" }));
  svg.append(s("line", { x1: 0, x2: width, y1: height - bottom, y2: height - bottom, stroke: "var(--line)" }));
  svg.append(s("text", { x: 0, y: height - 6 }, "first call"), s("text", { x: width, y: height - 6, "text-anchor": "end" }, `call ${calls.toLocaleString("en")}`));
  for (const t of memory.tensors) {
    const maker = byName.get(facts.order[t.first]);
    svg.append(s("rect", { x: X(t.first).toFixed(2), y: Y(t.offset + t.bytes).toFixed(2), width: Math.max(.6, X(t.last + 1) - X(t.first)).toFixed(2),
      height: Math.max(.6, Y(t.offset) - Y(t.offset + t.bytes)).toFixed(2), fill: maker ? kindColour(kindOf(maker)) : "var(--soft)", "fill-opacity": .75,
      stroke: "var(--card)", "stroke-width": .5, "data-kernel": maker && maker.name,
      "data-tip": `${t.tensor}  ${size(t.bytes)}\nfrom call ${t.first + 1} to ${t.last + 1}` + (maker ? `, made by ${maker.name}` : "") }));
  }
  return svg;
}
