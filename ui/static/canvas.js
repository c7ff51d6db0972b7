/* What all canvas panels share: sharp pixels, the theme's colours, text that shows what it is. */

class Palette {
  constructor(root) { this.root = root; this.forget(); }
  forget() { this.cache = new Map(); }
  get(name) {
    if (!this.cache.has(name)) this.cache.set(name, getComputedStyle(this.root).getPropertyValue('--' + name).trim());
    return this.cache.get(name);
  }
  font(px, weight = 400) { return `${weight} ${px}px ${this.get('mono') || 'monospace'}`; }
  /* Shares of one scale, monotone in luminance: free, 1, 2, 3-4, 5-8, 9 and more. */
  bySharers(sharers) { return this.get('share' + sharingLevel(sharers)); }
  inkOn(sharers) { return this.get('ink' + sharingLevel(sharers)); }
}

function sharingLevel(sharers) { return sharers <= 0 ? 0 : sharers === 1 ? 1 : sharers === 2 ? 2 : sharers <= 4 ? 3 : sharers <= 8 ? 4 : 5; }

/* One colour per block; numbers are printed too, so colour never stands alone. */
function identityColour(block) { return `oklch(${[.66, .76, .58][block % 3]} .11 ${(block * 137.508) % 360})`; }

/* Opaque, on its panel's ground: what lies under it need not be drawn, and nothing is blended. */
class Surface {
  constructor(element, palette) { Object.assign(this, { element, palette, context: element.getContext('2d', { alpha: false }), width: 0, height: 0 }); }
  /* Cleared and sized to the element. Reading the size lays the document out, so it is done once a resize. */
  begin() {
    const ratio = devicePixelRatio || 1;
    if (!this.width) { const box = this.element.getBoundingClientRect(); this.width = box.width; this.height = box.height; }
    const width = Math.round(this.width * ratio), height = Math.round(this.height * ratio);
    if (this.element.width !== width || this.element.height !== height) { this.element.width = width; this.element.height = height; }
    const context = this.context;
    context.setTransform(ratio, 0, 0, ratio, 0, 0); context.globalAlpha = 1; context.setLineDash([]);
    context.fillStyle = this.palette.get('panel'); context.fillRect(0, 0, this.width, this.height);
    return context;
  }
  forgetSize() { this.width = 0; }
  /* Does the page give it another size now than that in which it was drawn? */
  get isOutgrown() { const { width, height } = this.element.getBoundingClientRect(); return Boolean(width && this.width) && (width !== this.width || height !== this.height); }
  setHeight(pixels) { const css = Math.round(pixels) + 'px'; if (this.element.style.height !== css) { this.element.style.height = css; this.forgetSize(); } }
}

/* A box that is filled up to `share` of its width, or of its height from below; the rest shows through. */
function fillBox(context, [x, y, width, height], radius, share, isUpright) {
  if (share < 1) context.globalAlpha = .3;
  roundRect(context, x, y, width, height, radius); context.fill(); context.globalAlpha = 1;
  if (share >= 1) return;
  context.save(); context.clip();
  if (isUpright) context.fillRect(x, y + height * (1 - share), width, height * share); else context.fillRect(x, y, width * share, height);
  context.restore();
}

function strokeBox(context, [x, y, width, height], radius, colour, line) {
  context.strokeStyle = colour; context.lineWidth = line; roundRect(context, x, y, width, height, radius); context.stroke();
}

function roundRect(context, x, y, width, height, radius) {
  context.beginPath(); context.roundRect(x, y, width, height, Math.max(0, Math.min(radius, width / 2, height / 2)));
}

/* Text as it is: control, zero-width and direction-changing characters would hide or reorder what stands around them. */
function visibleText(text) {
  return text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, c => c === '\n' ? '↵' : c === '\t' ? '⇥' : c === '\r' ? '␍' : `‹${c.codePointAt(0).toString(16)}›`);
}

/* A token as a label: its spaces at the ends do not matter here, but a token of nothing else must be seen. */
function tokenLabel(text) {
  const shown = visibleText(text).trim();
  return shown || (text ? '␣' : '·');
}

/* Measuring is slow, and in a monospaced face plain characters are 0.6 em wide. */
function textWidth(context, text, pixels) { return /^[ -~]*$/.test(text) ? text.length * pixels * .602 : context.measureText(text).width; }

function shorten(text, characters) {
  const points = [...text];
  return points.length <= characters ? text : points.slice(0, Math.max(1, characters - 1)).join('') + '…';
}

function formatBytes(bytes) {
  for (const [unit, size] of [['GiB', 2 ** 30], ['MiB', 2 ** 20], ['KiB', 2 ** 10]])
    if (bytes >= size) { const n = bytes / size; return `${n >= 100 ? n.toFixed(0) : n >= 10 ? n.toFixed(1) : n.toFixed(2)} ${unit}`; }
  return `${Math.round(bytes)} B`;
}

const english = new Intl.NumberFormat('en');

function inEnglish(number) { return english.format(number); }

const plural = (count, noun) => `${inEnglish(count)} ${noun}${count === 1 ? '' : 's'}`;

if (typeof module !== 'undefined') module.exports = { visibleText, tokenLabel, shorten, formatBytes };
