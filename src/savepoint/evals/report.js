"use strict";
// Draws the charts in the colours of the page, and draws them again when those change. Without this script every figure is in the tables.
(() => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const probe = document.body.appendChild(document.createElement("span"));
  probe.hidden = true;

  // "var(--blue)" as the page means it now. A computed colour is the only form in which light-dark() is resolved.
  const colour = (name) => { probe.style.color = name; return getComputedStyle(probe).color; };
  const resolve = (value) =>
    Array.isArray(value) ? value.map(resolve)
    : value && typeof value === "object" ? Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolve(item)]))
    : typeof value === "string" && /^var\(--\w+\)$/.test(value) ? colour(value)
    : value;

  function draw(width) {
    if (!window.Plotly) return;
    for (const place of document.querySelectorAll("[data-figure]")) {
      const { data, layout } = resolve(figures[place.dataset.figure]);
      if (width) layout.width = Math.min(width, place.clientWidth);
      // Where the page is narrow, legends take a line an entry: they get room of their own, not the plot's.
      else if (place.clientWidth < 480) layout.height += 17 * data.filter((trace) => trace.showlegend !== false).length;
      Plotly.react(place, data, layout, { responsive: true, displayModeBar: false });
    }
  }

  async function load() {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent.trim()), (c) => c.charCodeAt(0));
    const text = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    const script = document.createElement("script");
    script.textContent = text;
    document.head.append(script);
    draw();
  }

  function choose(theme) {
    if (theme === "auto") root.removeAttribute("data-theme"); else root.dataset.theme = theme;
    for (const button of document.querySelectorAll(".theme button")) button.setAttribute("aria-pressed", String(button.value === theme));
    draw();
  }

  // A page opened from a file may be refused storage; the choice then lasts as long as the page.
  const stored = { get() { try { return localStorage.getItem("savepoint-theme"); } catch { return null; } }, set(v) { try { localStorage.setItem("savepoint-theme", v); } catch { /* refused */ } } };
  for (const button of document.querySelectorAll(".theme button")) {
    button.addEventListener("click", () => { stored.set(button.value); choose(button.value); });
  }
  dark.addEventListener("change", () => draw());
  matchMedia("(max-width: 44rem)").addEventListener("change", () => draw());

  const closed = () => document.querySelectorAll("details:not([open])");
  let opened = [];
  addEventListener("beforeprint", () => { opened = [...closed()]; opened.forEach((d) => { d.open = true; }); draw(660); });
  addEventListener("afterprint", () => { opened.forEach((d) => { d.open = false; }); draw(); });

  choose(["light", "dark"].includes(stored.get()) ? stored.get() : "auto");
  load().catch(() => { root.classList.add("nocharts"); document.getElementById("nocharts").hidden = false; });
})();
