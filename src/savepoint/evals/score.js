"use strict";
// Colours, and the filter of the answers. Without this script everything is there, unfiltered.
(() => {
  const root = document.documentElement;
  const stored = { get() { try { return localStorage.getItem("savepoint-theme"); } catch { return null; } }, set(v) { try { localStorage.setItem("savepoint-theme", v); } catch { /* refused */ } } };
  function choose(theme) {
    if (theme === "auto") root.removeAttribute("data-theme"); else root.dataset.theme = theme;
    for (const button of document.querySelectorAll(".theme button")) button.setAttribute("aria-pressed", String(button.value === theme));
  }
  for (const button of document.querySelectorAll(".theme button")) {
    button.addEventListener("click", () => { stored.set(button.value); choose(button.value); });
  }
  choose(["light", "dark"].includes(stored.get()) ? stored.get() : "auto");

  const form = document.querySelector(".filter");
  if (!form) return;
  const rows = [...document.querySelectorAll(".answers tbody tr")];
  const count = document.getElementById("count");
  function filter() {
    const code = form.elements.code.value;
    const words = form.elements.words.value.toLowerCase();
    let shown = 0;
    for (const row of rows) {
      const fits = (code === "" || row.dataset.code === code || (code === "wrong" && row.dataset.code !== "correct")) && row.textContent.toLowerCase().includes(words);
      row.hidden = !fits;
      shown += fits;
    }
    count.textContent = `${shown} of ${rows.length}`;
  }
  form.addEventListener("input", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  filter();
})();
