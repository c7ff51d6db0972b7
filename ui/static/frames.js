/* The server puts this before Gradio's scripts (first_script.py). Gradio's status tracker counts seconds in sixty frames a
   second while something is pending, shown or not, and that of "Loading ..." goes on for as long as the page is open: it
   is taken away while it counts. Nothing on this page shows such seconds, so their frames are not asked for. */
(() => {
  const ask = window.requestAnimationFrame;
  window.requestAnimationFrame = callback => {
    const isTracker = new Error().stack.split('\n', 3).some(line => line.includes('/statustracker-'));
    return isTracker ? 0 : ask.call(window, callback);
  };
})();
