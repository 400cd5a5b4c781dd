// OpenSSL: the few functions of the system's libssl that TLS takes, loaded at run time: no dependency of the build.
#pragma once

#include <cstddef>

namespace holmes::tls {

// Opaque, as in OpenSSL's headers.
struct Ssl;
struct Context;
struct Method;
struct Bio;
struct BioMethod;

using PskClientCallback = unsigned (*)(Ssl*, const char* hint, char* identity, unsigned max_identity_bytes,
                                       unsigned char* key, unsigned max_key_bytes);
using PskServerCallback = unsigned (*)(Ssl*, const char* identity, unsigned char* key, unsigned max_key_bytes);

// Values of OpenSSL's public headers, the same in 1.1.1 and 3.
inline constexpr int error_want_read = 2, error_want_write = 3, error_system_call = 5, error_zero_return = 6;
inline constexpr int verify_peer = 1;
inline constexpr int version_1_3 = 0x0304;

// Named as in OpenSSL, without the prefix. All functions are there.
struct OpenSsl {
  int (*init_crypto)(unsigned long long options, const void* settings) = nullptr;
  const Method* (*tls_method)() = nullptr;
  Context* (*ctx_new)(const Method*) = nullptr;
  void (*ctx_free)(Context*) = nullptr;
  long (*ctx_ctrl)(Context*, int command, long number, void* pointer) = nullptr;
  unsigned long (*ctx_set_options)(Context*, unsigned long options) = nullptr;
  int (*ctx_set_ciphersuites)(Context*, const char* names) = nullptr;
  int (*ctx_set_num_tickets)(Context*, std::size_t count) = nullptr;
  void (*ctx_set_default_read_buffer_len)(Context*, std::size_t bytes) = nullptr;
  void (*ctx_set_psk_client_callback)(Context*, PskClientCallback) = nullptr;
  void (*ctx_set_psk_server_callback)(Context*, PskServerCallback) = nullptr;
  Ssl* (*ssl_new)(Context*) = nullptr;
  void (*ssl_free)(Ssl*) = nullptr;
  int (*set_ex_data)(Ssl*, int index, void* data) = nullptr;
  void* (*get_ex_data)(const Ssl*, int index) = nullptr;
  void (*set_verify)(Ssl*, int mode, void* callback) = nullptr;
  void (*set_accept_state)(Ssl*) = nullptr;
  void (*set_connect_state)(Ssl*) = nullptr;
  void (*set0_rbio)(Ssl*, Bio*) = nullptr;
  void (*set0_wbio)(Ssl*, Bio*) = nullptr;
  int (*do_handshake)(Ssl*) = nullptr;
  int (*read)(Ssl*, void* bytes, int count) = nullptr;
  int (*write)(Ssl*, const void* bytes, int count) = nullptr;
  int (*get_error)(const Ssl*, int result) = nullptr;
  int (*session_reused)(const Ssl*) = nullptr;
  int (*key_update)(Ssl*, int type) = nullptr;
  const char* (*get_version)(const Ssl*) = nullptr;
  const void* (*get_current_cipher)(const Ssl*) = nullptr;
  const char* (*cipher_get_name)(const void* cipher) = nullptr;
  BioMethod* (*bio_meth_new)(int type, const char* name) = nullptr;
  int (*bio_meth_set_write)(BioMethod*, int (*write)(Bio*, const char* bytes, int count)) = nullptr;
  int (*bio_meth_set_ctrl)(BioMethod*, long (*ctrl)(Bio*, int command, long number, void* pointer)) = nullptr;
  Bio* (*bio_new)(const BioMethod*) = nullptr;
  void (*bio_set_init)(Bio*, int is_ready) = nullptr;
  void (*bio_set_data)(Bio*, void* data) = nullptr;
  void* (*bio_get_data)(Bio*) = nullptr;
  Bio* (*bio_new_socket)(int fd, int close) = nullptr;
  unsigned long (*err_get_error)() = nullptr;
  void (*err_clear_error)() = nullptr;
  void (*err_error_string_n)(unsigned long error, char* text, std::size_t bytes) = nullptr;
  const char* (*err_reason_error_string)(unsigned long error) = nullptr;
};

// The system's OpenSSL (3, else 1.1.1), or what HOLMES_SSL_LIBRARY names; loaded once, never unloaded. Throws
// UsageError naming what was tried and the fix. Thread-safe.
const OpenSsl& openssl();

}  // namespace holmes::tls
