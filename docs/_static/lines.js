// On a phone code wraps. Each line gets a box that knows its indentation, so that what goes on stands further in (site.css).
const narrow = matchMedia("(max-width: 600px)").matches;
for (const code of narrow ? document.querySelectorAll("article .highlight pre") : []) {
  const lines = [document.createElement("span")];
  for (const node of code.childNodes) {
    // A node of the highlighter may hold several lines, as that of a docstring does.
    node.textContent.split(/(?<=\n)/).forEach((text) => {
      const part = node.cloneNode(false);
      part.textContent = text;
      lines.at(-1).append(part);
      if (text.endsWith("\n")) lines.push(document.createElement("span"));
    });
  }
  for (const line of lines) {
    line.className = "code-line";
    line.style.setProperty("--indent", line.textContent.search(/[^ ]|$/));
  }
  code.replaceChildren(...lines.filter((line) => line.textContent));
}
