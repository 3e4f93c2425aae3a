// Curves and sliders over the model: everything is drawn anew whenever a slider moves.
"use strict";
(() => {
  const told = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg", WIDTH = 640, HEIGHT = 340, LEFT = 56, BOTTOM = 40, TOP = 12, RIGHT = 12;
  const sliders = Object.fromEntries(["parameters", "step", "bandwidth", "workers", "period"].map((name) => [
    name, document.getElementById(name)]));
  const at = (name) => told.sliders[name][Number(sliders[name].value)];
  const rate = (bits) => bits >= 1e9 ? `${+(bits / 1e9).toPrecision(3)} Gbit/s` : `${+(bits / 1e6).toPrecision(3)} Mbit/s`;
  const count = (n) => n >= 1e9 ? `${+(n / 1e9).toPrecision(3)} B` : `${+(n / 1e6).toPrecision(3)} M`;
  const span = (s) => s < 1 ? `${+(1000 * s).toPrecision(3)} ms` : `${+s.toPrecision(3)} s`;
  const words = { parameters: count, step: span, bandwidth: rate, workers: String, period: (n) => `${n} steps` };

  function place(bandwidth) {
    const workers = at("workers"), base = told.place, same = at("parameters") === base.parameters;
    return {
      ...base, workers, parameters: at("parameters"), step_s: at("step"), maximum: told.maxima[workers],
      layers: same ? base.layers : told.layers[at("parameters")],
      sites: workers % base.sites ? 1 : base.sites,
      link: { ...base.link, up: bandwidth, down: base.link.down && Math.min(base.link.down, bandwidth) },
    };
  }
  const element = (name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const across = (bits) => LEFT + (WIDTH - LEFT - RIGHT) * (Math.log10(bits) - 7) / 4;
  function frame(id, title, heights) {
    const svg = document.getElementById(id);
    svg.replaceChildren(element("title", {}, title));
    for (const bits of [1e7, 1e8, 1e9, 1e10, 1e11]) {
      svg.append(element("line", { x1: across(bits), x2: across(bits), y1: TOP, y2: HEIGHT - BOTTOM, class: "grid" }));
      svg.append(element("text", { x: across(bits), y: HEIGHT - 16, "text-anchor": "middle" }, rate(bits)));
    }
    for (const [y, label] of heights) {
      svg.append(element("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y, class: "grid" }));
      svg.append(element("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, label));
    }
    const now = across(at("bandwidth"));
    svg.append(element("line", { x1: now, x2: now, y1: TOP, y2: HEIGHT - BOTTOM, class: "now" }));
    return svg;
  }
  const line = (svg, points, number) => {
    const path = points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    svg.append(element("path", { d: path, class: `curve colour-${number}` }));
  };
  const inside = HEIGHT - TOP - BOTTOM;
  function draw() {
    for (const name of Object.keys(sliders)) {
      document.getElementById(`${name}-value`).textContent = words[name](at(name));
      sliders[name].setAttribute("aria-valuetext", words[name](at(name)));
    }
    const period = at("period"), high = (share) => HEIGHT - BOTTOM - inside * share;
    const first = frame("curves", "Utilisation by bandwidth", [0, 0.25, 0.5, 0.75, 1].map((u) => [high(u), `${100 * u} %`]));
    const tall = (steps) => HEIGHT - BOTTOM - inside * Math.log10(steps) / 5;
    const second = frame("frontier", "Smallest period by bandwidth",
      [1, 10, 100, 1000, 10000].map((steps) => [tall(steps), String(steps)]));
    const here = place(at("bandwidth")), rows = [];
    told.kinds.forEach((kind, number) => {
      const steps = Math.max(period, cadenzaPlan.least(kind, here)), used = [], shortest = [];
      for (const bits of told.grid) {
        const where = place(bits);
        used.push([across(bits), high(cadenzaPlan.utilisation(kind, steps, where))]);
        const found = cadenzaPlan.smallestPeriod(kind, told.target, where);
        if (found !== null) shortest.push([across(bits), tall(found)]);
      }
      line(first, used, number);
      if (shortest.length > 1) line(second, shortest, number);
      rows.push([kind.label, cadenzaPlan.utilisation(kind, steps, here), steps,
        cadenzaPlan.smallestPeriod(kind, told.target, here)]);
    });
    document.getElementById("rows").replaceChildren(...rows.map(([label, used, steps, found], number) => {
      const row = document.createElement("tr");
      const cells = [label, kindPeriod(number, steps), `${(100 * used).toFixed(1)} %`, found === null ? "none" : found.toLocaleString("en")];
      cells.forEach((text, column) => {
        const cell = document.createElement(column ? "td" : "th");
        if (!column) {
          cell.scope = "row";
          const key = document.createElement("span");
          key.className = `key back-${number}`;
          cell.append(key);
        }
        cell.append(String(text));
        row.append(cell);
      });
      row.dataset.utilisation = used;
      row.dataset.smallest = found === null ? "" : found;
      return row;
    }));
  }
  const kindPeriod = (number, steps) => told.kinds[number].name === "ddp" ? 1 : steps;
  for (const slider of Object.values(sliders)) slider.addEventListener("input", draw);
  window.cadenzaPlace = place;
  draw();
  window.cadenzaReady = performance.now();
})();
