"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const plots = [...document.querySelectorAll(".plot")];
  const root = document.documentElement;
  const hidden = new Set(); // runs that are switched off
  const shown = new Map(plots.map((plot) => [plot.id, 0])); // which view of each chart
  const options = { responsive: true, displayModeBar: false, doubleClick: "reset" };
  const touch = matchMedia("(pointer: coarse)").matches;

  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);

  // Charts ------------------------------------------------------------------------------------------------------

  /** Return the colour that holds now of `light-dark(…, …)`, which charts do not understand. */
  const ofTheme = (value) => value.trim().replace(/^light-dark\((.+), (.+)\)$/, dark() ? "$2" : "$1");

  /** Return a figure with the page's colours of the moment in the place of their names. */
  function coloured(value, style) {
    if (typeof value === "string") {
      const name = value.match(/^var\((--[\w-]+)\)$/);
      return name ? ofTheme(style.getPropertyValue(name[1])) : value;
    }
    if (Array.isArray(value)) {
      return typeof value[0] === "string" ? value.map((item) => coloured(item, style)) : value;
    }
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item, style)]));
    }
    return value;
  }

  function draw(plot) {
    const style = getComputedStyle(root);
    const figure = figures[plot.id][shown.get(plot.id)];
    const data = figure.data.map((trace) => ({
      ...coloured(trace, style),
      visible: !(trace.meta && hidden.has(trace.meta.run)),
    }));
    const layout = coloured(figure.layout, style);
    for (const item of layout.annotations || []) item.font = coloured(item.font, style);
    for (const item of layout.shapes || []) item.line = coloured(item.line, style);
    layout.height = Number(plot.dataset.height);
    layout.dragmode = touch ? false : "zoom"; // on a touch screen a finger on a chart scrolls the page
    plot.drawn = true;
    const drawn = Plotly.react(plot, data, layout, options);
    if (plot.dataset.linked && !plot.followed) {
      plot.followed = true;
      plot.on("plotly_relayout", (change) => follow(plot, change));
    }
    return drawn;
  }

  const linkedTo = (plot) =>
    plots.filter((other) => other !== plot && other.drawn && plot.dataset.linked && other.dataset.linked === plot.dataset.linked);

  let following = false;

  /** Zoom the charts that are linked to one as it was zoomed. */
  async function follow(plot, change) {
    const low = change["xaxis.range[0]"] ?? change["xaxis.range"]?.[0];
    const high = change["xaxis.range[1]"] ?? change["xaxis.range"]?.[1];
    if (following || (low === undefined && !change["xaxis.autorange"])) return;
    const update = low === undefined ? { "xaxis.autorange": true } : { "xaxis.range": [low, high] };
    following = true;
    try {
      await Promise.all(linkedTo(plot).map((other) => Plotly.relayout(other, update)));
    } finally {
      following = false;
    }
  }

  const redraw = () => plots.filter((plot) => plot.drawn).forEach(draw);

  /** Draw what can be seen first, then the others one by one, so that the page can be read and scrolled at once. */
  async function drawAll() {
    const seen = (plot) => plot.getBoundingClientRect().top < innerHeight;
    for (const plot of [...plots.filter(seen), ...plots.filter((plot) => !seen(plot))]) {
      await new Promise((next) => setTimeout(next));
      await draw(plot);
    }
    window.cadenzaReady = performance.now();
  }

  // Views, runs, keys -------------------------------------------------------------------------------------------

  for (const button of document.querySelectorAll(".views button")) {
    button.addEventListener("click", () => {
      const { chart, view } = button.dataset;
      shown.set(chart, Number(view));
      const figure = button.closest("figure");
      for (const other of figure.querySelectorAll(".views button")) other.setAttribute("aria-pressed", other === button);
      for (const note of figure.querySelectorAll(".view-note")) note.hidden = note.dataset.view !== view;
      draw(document.getElementById(chart));
    });
  }

  for (const box of document.querySelectorAll(".switches input")) {
    box.addEventListener("change", () => {
      const run = Number(box.dataset.run);
      if (box.checked) hidden.delete(run);
      else hidden.add(run);
      for (const key of document.querySelectorAll(`.legend [data-run="${run}"]`)) key.classList.toggle("off", !box.checked);
      redraw();
    });
  }

  const moves = { "+": [0.25, -0.25], "=": [0.25, -0.25], "-": [-0.5, 0.5], ArrowLeft: [-0.2, -0.2], ArrowRight: [0.2, 0.2] };
  for (const frame of document.querySelectorAll(".frame")) {
    frame.addEventListener("keydown", (event) => {
      const plot = frame.firstElementChild;
      if (event.ctrlKey || event.metaKey || event.altKey || !plot.drawn) return;
      if (event.key === "0") {
        [plot, ...linkedTo(plot)].forEach(draw);
      } else if (event.key in moves) {
        const [low, high] = plot.layout.xaxis.range;
        const [by, to] = moves[event.key];
        Plotly.relayout(plot, "xaxis.range", [low + by * (high - low), high + to * (high - low)]);
      } else return;
      event.preventDefault();
    });
  }

  // Tables ------------------------------------------------------------------------------------------------------

  const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const csv = (table) =>
    [...table.rows]
      .map((row) => [...row.cells].map((cell) => quoted(cell.dataset.value ?? cell.textContent)).join(","))
      .join("\n") + "\n";

  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.createElement("textarea"); // where the clipboard is not given to pages
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
  }

  for (const button of document.querySelectorAll(".copy")) {
    button.addEventListener("click", async () => {
      const table = button.closest(".table").querySelector("table");
      await copy(csv(table));
      button.focus();
      document.getElementById("said").textContent = `${table.rows.length - 1} rows copied`;
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy as CSV"), 2000);
    });
  }

  /** A table that is wider than its place can be scrolled with the keyboard. */
  const scrollable = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
      else target.removeAttribute("tabindex");
    }
  });
  document.querySelectorAll(".table-scroll").forEach((place) => scrollable.observe(place));

  // Light and dark ----------------------------------------------------------------------------------------------

  const themes = { system: "auto", light: "light", dark: "dark" };
  const button = document.getElementById("theme");
  const store = {
    get: () => { try { return localStorage.getItem("cadenza-theme"); } catch { return null; } },
    set: (theme) => { try { localStorage.setItem("cadenza-theme", theme); } catch { /* the choice lasts as long as the page */ } },
  };
  let theme = store.get() in themes ? store.get() : "system";

  function dress() {
    if (theme === "system") delete root.dataset.theme;
    else root.dataset.theme = theme;
    button.textContent = `Theme: ${themes[theme]}`;
    redraw();
  }

  button.hidden = false;
  button.addEventListener("click", () => {
    const names = Object.keys(themes);
    theme = names[(names.indexOf(theme) + 1) % names.length];
    store.set(theme);
    dress();
  });
  system.addEventListener("change", dress);
  dress();
  document.addEventListener("DOMContentLoaded", drawAll); // plotly stands below this script
})();
