/* The view as a picture: the boxes, the text and the canvases of the component painted onto one canvas. */

const PICTURE_SKIPS = 'button, select, input, label, details, .sr, .kv-keys, .trackkey, .btns, [hidden]';

function paintPicture(root, palette) {
  const ratio = Math.max(2, devicePixelRatio || 1), frame = root.getBoundingClientRect(), margin = 14;
  const canvas = document.createElement('canvas');
  canvas.width = Math.round((frame.width + 2 * margin) * ratio); canvas.height = Math.round((frame.height + 2 * margin) * ratio);
  const context = canvas.getContext('2d');
  context.scale(ratio, ratio); context.fillStyle = palette.get('ground'); context.fillRect(0, 0, canvas.width, canvas.height);
  context.translate(margin - frame.left, margin - frame.top);
  paintElement(context, root);
  return canvas;
}

function paintElement(context, target) {
  if (target.matches(PICTURE_SKIPS)) return;
  const box = target.getBoundingClientRect(), style = getComputedStyle(target);
  if (!box.width || !box.height || style.visibility === 'hidden') return;
  context.save();
  paintBox(context, box, style);
  if (style.overflowX !== 'visible' || style.overflowY !== 'visible') { context.beginPath(); context.rect(box.left, box.top, box.width, box.height); context.clip(); }
  if (target.tagName === 'CANVAS') context.drawImage(target, box.left, box.top, box.width, box.height);
  else for (const child of target.childNodes) {
    if (child.nodeType === Node.TEXT_NODE) paintText(context, child, style);
    else if (child.nodeType === Node.ELEMENT_NODE) paintElement(context, child);
  }
  context.restore();
}

function paintBox(context, box, style) {
  const isSeen = colour => !/^rgba\(.*, 0\)$|^transparent$/.test(colour), width = parseFloat(style.borderTopWidth);
  roundRect(context, box.left + width / 2, box.top + width / 2, box.width - width, box.height - width, parseFloat(style.borderTopLeftRadius) || 0);
  if (isSeen(style.backgroundColor)) { context.fillStyle = style.backgroundColor; context.fill(); }
  if (!width || style.borderTopStyle === 'none' || !isSeen(style.borderTopColor)) return;
  context.strokeStyle = style.borderTopColor; context.lineWidth = width; context.setLineDash(style.borderTopStyle === 'dashed' ? [3, 2] : []);
  context.stroke(); context.setLineDash([]);
}

/* Line by line, where the browser laid them. */
function paintText(context, node, style) {
  if (!node.data.trim()) return;
  context.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`; context.fillStyle = style.color; context.textBaseline = 'middle'; context.textAlign = 'left';
  context.globalAlpha = Number(style.opacity);
  const range = document.createRange();
  range.selectNodeContents(node);
  const lines = range.getClientRects();
  if (lines.length === 1) context.fillText(node.data, lines[0].left, (lines[0].top + lines[0].bottom) / 2);
  else paintWords(context, node, range);
  context.globalAlpha = 1;
}

function paintWords(context, node, range) {
  for (const match of node.data.matchAll(/\S+/g)) {
    range.setStart(node, match.index); range.setEnd(node, match.index + match[0].length);
    const box = range.getBoundingClientRect();
    context.fillText(match[0], box.left, (box.top + box.bottom) / 2);
  }
}
