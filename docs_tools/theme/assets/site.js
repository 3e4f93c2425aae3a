// The documentation's own script: menu, theme, copying, search, the index's filter. Works from file:// too.
"use strict";
const base = document.currentScript.dataset.base;
const byId = (id) => document.getElementById(id);

const menu = byId("menu"), nav = byId("nav");
menu.addEventListener("click", () => menu.setAttribute("aria-expanded", String(nav.classList.toggle("shown"))));
const here = nav.querySelector("[aria-current]");
if (here) nav.scrollTop = here.offsetTop - nav.clientHeight / 3;
if (matchMedia("(max-width: 1199px)").matches) document.querySelector(".toc")?.removeAttribute("open");

const themes = ["auto", "light", "dark"];
const theme = byId("theme");
function showTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  theme.textContent = `Theme: ${name}`;
}
showTheme(document.documentElement.dataset.theme || "auto");
theme.addEventListener("click", () => {
  const next = themes[(themes.indexOf(document.documentElement.dataset.theme || "auto") + 1) % themes.length];
  showTheme(next);
  try { next === "auto" ? localStorage.removeItem("cadenza-theme") : localStorage.setItem("cadenza-theme", next); } catch { /* not kept */ }
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button.copy");
  if (!button) return;
  const text = button.closest(".highlight").querySelector("code").innerText;
  try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; } catch { button.textContent = "Not allowed"; }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
});

// Search: every word must occur somewhere in a section; titles and beginnings count more.
const dialog = byId("search"), query = byId("query"), hits = byId("hits"), found = byId("found");
const IDLE = new Set(["a", "an", "and", "the", "with", "of", "to", "in", "on", "my", "how", "do", "i", "is", "for"]);
let sections = null, asked = false;
function load() {
  if (asked) return;
  asked = true;
  const script = document.createElement("script");
  script.src = `${base}assets/search_index.js`;
  script.onload = () => {
    sections = window.cadenzaSearch.map(([url, title, page, text, weight]) => ({
      url, title, page, text, weight, head: `${title} ${page}`.toLowerCase(), low: text.toLowerCase(),
    }));
    find();
  };
  document.head.append(script);
}
function score(section, words, phrase) {
  let sum = 0, all = 0;
  for (const word of words) {
    const inTitle = section.head.indexOf(word), inText = section.low.indexOf(word);
    if (inTitle < 0 && inText < 0) continue;
    all += 1;
    if (inTitle >= 0) sum += inTitle === 0 || /\W/.test(section.head[inTitle - 1]) ? 8 : 3;
    if (inText >= 0) sum += Math.min(section.low.split(word).length - 1, 6) / 3;
  }
  if (all < words.length) return 0;
  if (section.title.toLowerCase() === phrase) sum += 30;
  if (section.low.includes(phrase)) sum += 3;
  return sum * section.weight;
}
function find() {
  const phrase = query.value.trim().toLowerCase();
  const words = phrase.split(/\s+/).filter((word) => word && !IDLE.has(word));
  hits.textContent = "";
  if (!words.length || !sections) { found.textContent = ""; return; }
  const ranked = sections.map((section) => [score(section, words, phrase), section]).filter(([points]) => points > 0)
    .sort((one, other) => other[0] - one[0]);
  found.textContent = ranked.length ? `${ranked.length} places` : `Nothing has all of these words: ${words.join(", ")}.`;
  for (const [, section] of ranked.slice(0, 25)) {
    const at = Math.max(0, section.low.indexOf(words[0]) - 50);
    const link = document.createElement("a");
    link.href = base + section.url;
    const title = document.createElement("b"), snippet = document.createElement("small");
    title.textContent = section.title;
    snippet.textContent = `${section.page} — ${at ? "…" : ""}${section.text.slice(at, at + 140)}`;
    link.append(title, snippet);
    const item = document.createElement("li");
    item.append(link);
    hits.append(item);
  }
}
function openSearch() { load(); dialog.showModal(); query.select(); find(); }
byId("find").addEventListener("click", openSearch);
query.addEventListener("input", find);
hits.addEventListener("click", (event) => event.target.closest("a") && dialog.close());
dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
dialog.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && document.activeElement === query) { event.preventDefault(); hits.querySelector("a")?.click(); }
  if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
  const stops = [query, ...hits.querySelectorAll("a")];
  const at = stops.indexOf(document.activeElement) + (event.key === "ArrowDown" ? 1 : -1);
  stops[Math.max(0, Math.min(at, stops.length - 1))].focus();
  event.preventDefault();
});
document.addEventListener("keydown", (event) => {
  const typing = /^(input|textarea|select)$/i.test(event.target.localName);
  if (!typing && !dialog.open && (event.key === "/" || (event.key === "k" && (event.ctrlKey || event.metaKey)))) {
    event.preventDefault();
    openSearch();
  }
});

// The index: rows that do not have what was typed are hidden.
const filter = byId("filter");
if (filter) {
  const rows = [...document.querySelectorAll(".names li")].map((row) => [row, row.textContent.toLowerCase()]);
  const count = byId("filtered");
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const [row, text] of rows) {
      row.hidden = !words.every((word) => text.includes(word));
      shown += row.hidden ? 0 : 1;
    }
    for (const part of document.querySelectorAll(".letter")) part.hidden = !part.querySelector("li:not([hidden])");
    count.textContent = `${shown} of ${rows.length} entries`;
  });
}
