// On a phone a table of words is shown as blocks: each cell under the other, behind the name of its column (site.css).
for (const table of document.querySelectorAll("table.docutils")) {
  const names = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
  const cells = [...table.querySelectorAll("tbody td")];
  for (const cell of cells) if (names[cell.cellIndex] && cell.textContent) cell.dataset.column = names[cell.cellIndex];
  if (cells.filter((cell) => cell.textContent.length > 20).length > 0.3 * cells.length) table.classList.add("words");
}
