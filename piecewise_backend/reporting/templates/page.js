"use strict";
(() => {
  const all = (root, selector) => Array.from(root.querySelectorAll(selector));

  function showPiece(graph, structure, stepName, follow) {
    for (const article of all(graph, ".piece")) article.hidden = article.dataset.structure !== structure;
    const placeholder = graph.querySelector(".placeholder");
    if (placeholder) placeholder.hidden = true;
    for (const button of all(graph, "[data-piece]")) {
      const isShown = button.dataset.piece === structure;
      button.classList.toggle("shown", isShown);
      if (button.hasAttribute("aria-pressed")) button.setAttribute("aria-pressed", String(isShown));
    }
    const article = graph.querySelector(".piece:not([hidden])");
    if (!article) return;
    if (stepName) article.querySelector(".piece-name").textContent = stepName;
    const stacked = getComputedStyle(graph.querySelector(".workbench")).gridTemplateColumns.split(" ").length === 1;
    if (follow && stacked) graph.querySelector(".inspector").scrollIntoView({ block: "start" });
  }

  function showTab(article, name) {
    for (const tab of all(article, "[role=tab]")) tab.setAttribute("aria-selected", String(tab.dataset.tab === name));
    for (const panel of all(article, ".tab")) panel.hidden = panel.dataset.tab !== name;
  }

  function showGraph(number) {
    for (const tab of all(document, ".graphs [role=tab]"))
      tab.setAttribute("aria-selected", String(tab.dataset.graph === number));
    for (const graph of all(document, ".graph")) graph.hidden = graph.id !== `graph-${number}`;
  }

  async function copy(button) {
    const shown = button.closest(".piece").querySelector(".tab:not([hidden])");
    const said = button.textContent;
    try {
      await navigator.clipboard.writeText(shown.innerText);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(shown);
      button.textContent = "selected";
    }
    setTimeout(() => { button.textContent = said; }, 1200);
  }

  for (const graph of all(document, ".graph")) {
    const first = graph.querySelector(".folded .step:last-child") || graph.querySelector(".step");
    if (first && matchMedia("(min-width: 901px)").matches)
      showPiece(graph, first.dataset.piece, first.dataset.step, false);
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.piece) showPiece(button.closest(".graph"), button.dataset.piece, button.dataset.step, true);
    else if (button.dataset.graph) showGraph(button.dataset.graph);
    else if (button.dataset.tab) showTab(button.closest(".piece"), button.dataset.tab);
    else if (button.classList.contains("copy")) copy(button);
  });

  document.addEventListener("keydown", (event) => {
    const step = event.target.closest(".step");
    if (!step || (event.key !== "ArrowDown" && event.key !== "ArrowUp")) return;
    const steps = all(step.closest(".steps"), ".step");
    const next = steps[steps.indexOf(step) + (event.key === "ArrowDown" ? 1 : -1)];
    if (!next) return;
    event.preventDefault();
    next.focus();
    showPiece(next.closest(".graph"), next.dataset.piece, next.dataset.step, false);
  });
})();
