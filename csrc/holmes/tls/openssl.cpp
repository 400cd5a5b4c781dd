#include "holmes/tls/openssl.hpp"

#include <dlfcn.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "holmes/core/env.hpp"
#include "holmes/core/error.hpp"
#include "holmes/core/log.hpp"
#include "holmes/core/text.hpp"

namespace holmes::tls {
namespace {

// I/O threads outlive main: OpenSSL must not take itself apart under them.
constexpr unsigned long long init_no_atexit = 0x00080000;

std::unique_ptr<OpenSsl> load() {
  const auto named = Env::read().ssl_library;
  const auto candidates =
      named ? std::vector<std::string>{*named} : std::vector<std::string>{"libssl.so.3", "libssl.so.1.1"};
  std::string tried, path;
  void* handle = nullptr;
  for (const auto& candidate : candidates) {
    handle = ::dlopen(candidate.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    path = candidate;
    if (handle != nullptr) break;
    const char* reason = ::dlerror();
    add_word(tried, reason ? reason : candidate, "; ");
  }
  if (handle == nullptr) {
    throw UsageError("TLS is asked for, but there is no OpenSSL: " + tried +
                     "; install it (package libssl3 or openssl), name its libssl with HOLMES_SSL_LIBRARY, or set "
                     "HOLMES_TLS=off");
  }
  auto made = std::make_unique<OpenSsl>();
  const auto resolve = [&]<class Function>(const char* symbol, Function*& function) {
    function = reinterpret_cast<Function*>(::dlsym(handle, symbol));
    if (function == nullptr)
      throw UsageError(path + " has no function " + symbol +
                       "; TLS needs OpenSSL 1.1.1 or later (HOLMES_SSL_LIBRARY names one)");
  };
  resolve("OPENSSL_init_crypto", made->init_crypto);
  resolve("TLS_method", made->tls_method);
  resolve("SSL_CTX_new", made->ctx_new);
  resolve("SSL_CTX_free", made->ctx_free);
  resolve("SSL_CTX_ctrl", made->ctx_ctrl);
  resolve("SSL_CTX_set_options", made->ctx_set_options);
  resolve("SSL_CTX_set_ciphersuites", made->ctx_set_ciphersuites);
  resolve("SSL_CTX_set_num_tickets", made->ctx_set_num_tickets);
  resolve("SSL_CTX_set_default_read_buffer_len", made->ctx_set_default_read_buffer_len);
  resolve("SSL_CTX_set_psk_client_callback", made->ctx_set_psk_client_callback);
  resolve("SSL_CTX_set_psk_server_callback", made->ctx_set_psk_server_callback);
  resolve("SSL_new", made->ssl_new);
  resolve("SSL_free", made->ssl_free);
  resolve("SSL_set_ex_data", made->set_ex_data);
  resolve("SSL_get_ex_data", made->get_ex_data);
  resolve("SSL_set_verify", made->set_verify);
  resolve("SSL_set_accept_state", made->set_accept_state);
  resolve("SSL_set_connect_state", made->set_connect_state);
  resolve("SSL_set0_rbio", made->set0_rbio);
  resolve("SSL_set0_wbio", made->set0_wbio);
  resolve("SSL_do_handshake", made->do_handshake);
  resolve("SSL_read", made->read);
  resolve("SSL_write", made->write);
  resolve("SSL_get_error", made->get_error);
  resolve("SSL_session_reused", made->session_reused);
  resolve("SSL_key_update", made->key_update);
  resolve("SSL_get_version", made->get_version);
  resolve("SSL_get_current_cipher", made->get_current_cipher);
  resolve("SSL_CIPHER_get_name", made->cipher_get_name);
  resolve("BIO_meth_new", made->bio_meth_new);
  resolve("BIO_meth_set_write", made->bio_meth_set_write);
  resolve("BIO_meth_set_ctrl", made->bio_meth_set_ctrl);
  resolve("BIO_new", made->bio_new);
  resolve("BIO_set_init", made->bio_set_init);
  resolve("BIO_set_data", made->bio_set_data);
  resolve("BIO_get_data", made->bio_get_data);
  resolve("BIO_new_socket", made->bio_new_socket);
  resolve("ERR_get_error", made->err_get_error);
  resolve("ERR_clear_error", made->err_clear_error);
  resolve("ERR_error_string_n", made->err_error_string_n);
  resolve("ERR_reason_error_string", made->err_reason_error_string);
  made->init_crypto(init_no_atexit, nullptr);
  log(LogLevel::info, std::nullopt, "TLS by OpenSSL from " + path);
  return made;
}

}  // namespace

const OpenSsl& openssl() {
  static std::mutex mutex;
  static const OpenSsl* loaded = nullptr;  // never destroyed: threads go on to the end of the process
  std::lock_guard lock(mutex);
  if (loaded == nullptr) loaded = load().release();
  return *loaded;
}

}  // namespace holmes::tls
