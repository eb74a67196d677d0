// Search without a server. Browsers refuse workers to pages that are opened from a folder, so there the
// search script runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inner = this.frame.contentWindow
      inner.document.open()
      inner.document.write("<html><body></body></html>")
      inner.document.close()
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.loaded = new Promise((resolve, reject) => {
        const script = inner.document.createElement("script")
        script.src = url
        script.onload = resolve
        script.onerror = reject
        inner.document.body.append(script)
      })
    }

    postMessage(data) {
      const inner = this.frame.contentWindow
      this.loaded.then(() => inner.dispatchEvent(new inner.MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
